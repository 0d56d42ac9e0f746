"""A model, a machine and a batch -> units with their times: what the planner needs to know.

```
 name or config.json --+                         +-> Unit: parameters, forward_s, backward_s,
 machine --------------+--> roofline-free count -+          update_s, down_s, up_s
 measured profile (CSV) --------------------------+
```

Times come from a measured profile where there is one (docs/formats/profile.md), else from
counting: multiplications of the matrices at the machine's sustained rate, bytes at the link's and
host's. Left out: kernels that miss the sustained rate, vision towers (profile those), and
communication between devices.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
https://arxiv.org/abs/2104.04473, appendix (operations of a transformer); Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, https://arxiv.org/abs/2205.05198,
equation 2 (activation bytes; the attention matrix is left out, as fused attention never keeps it).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path

from tierwise.core.errors import ConfigError, DataError, MissingFileError, UsageError
from tierwise.core.facts import Fact, load_facts
from tierwise.core.records import write_whole
from tierwise.core.report import csv_of

GRAD_BYTES = WEIGHT_BYTES = 2  # bf16, each way over the link
STATE_BYTES = 12  # fp32 p, m, v


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A block of the model in forward order, and what it costs a step.

    Attributes:
        name: Of the block.
        parameters: Trained numbers in it.
        forward_s: Device time of its forward.
        backward_s: Device time of its backward, recomputation included.
        update_s: Host time of its whole update.
        down_s: Time of its gradients on the link to the host.
        up_s: Time of its weights on the link to the device.
    """

    name: str
    parameters: int
    forward_s: float
    backward_s: float
    update_s: float
    down_s: float
    up_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device, its link and its host.

    Attributes:
        device_flop_s: Sustained operations a second in bf16.
        device_memory_bytes: Of the device.
        link_bytes_s: Each way.
        host_parameters_s: Parameters the host updates in a second, all threads.
        host_memory_bytes: Of the host.
    """

    device_flop_s: float
    device_memory_bytes: float
    link_bytes_s: float
    host_parameters_s: float
    host_memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a decoder-only transformer with gated MLP and grouped keys (Qwen2, Llama)."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    vocabulary_size: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, MLP, two norms (biases are too few to count)."""
        narrow = self.hidden_size * self.num_key_value_heads // self.num_heads
        attention = 2 * self.hidden_size * (self.hidden_size + narrow)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        ends = (1 if self.tied else 2) * self.vocabulary_size * self.hidden_size
        return self.num_layers * self.layer_parameters + ends + self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step works on.

    Attributes:
        tokens: Of all micro-batches together.
        sequence_tokens: Longest sequence, for attention.
        micro_batch_tokens: On the device at once.
        checkpointing: Activations are recomputed in backward, layer by layer.
    """

    tokens: int
    sequence_tokens: int
    micro_batch_tokens: int
    checkpointing: bool


@cache
def _facts() -> Mapping[str, Fact]:
    with resources.as_file(resources.files("tierwise.offload") / "data" / "facts.csv") as path:
        return load_facts(path)


def names_of(kind: str) -> list[str]:
    """Return the models or machines that are known by name (`kind` is `model` or `machine`)."""
    prefix = f"{kind}."
    found = [key[len(prefix) :].rsplit(".", 1)[0] for key in _facts() if key.startswith(prefix)]
    return list(dict.fromkeys(found))


def machine_named(name: str) -> Machine:
    """Return a machine of the facts file.

    Raises:
        UsageError: No such name.
    """
    if name not in names_of("machine"):
        raise UsageError(f"no machine {name!r}", hint=f"machines: {', '.join(names_of('machine'))}")
    values = {f.name: _facts()[f"machine.{name}.{f.name}"].value for f in fields(Machine)}
    return Machine(**values)


def decoder_named(name: str) -> Decoder:
    """Return a model of the facts file, or one described by a Hugging Face `config.json`.

    Raises:
        UsageError: Neither a known name nor a file.
        DataError: The file does not describe a decoder of this kind.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        return _read_config(path)
    if name not in names_of("model"):
        hint = f"models: {', '.join(names_of('model'))}; or a config.json, or a profile.csv"
        raise UsageError(f"no model {name!r}", hint=hint)
    values = {f.name: int(_facts()[f"model.{name}.{f.name}"].value) for f in fields(Decoder)}
    tied = bool(values.pop("tied"))
    return Decoder(**values, tied=tied)


def _read_config(path: Path) -> Decoder:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        tree = tree.get("text_config", tree)
        heads = int(tree["num_attention_heads"])
        return Decoder(
            hidden_size=int(tree["hidden_size"]),
            num_layers=int(tree["num_hidden_layers"]),
            intermediate_size=int(tree["intermediate_size"]),
            num_heads=heads,
            num_key_value_heads=int(tree.get("num_key_value_heads", heads)),
            vocabulary_size=int(tree["vocab_size"]),
            tied=bool(tree.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path} does not describe a decoder model: {error}") from error


def count_units(model: Decoder, machine: Machine, batch: Batch) -> list[Unit]:
    """Return the units of a decoder in forward order, by counting operations and bytes."""
    layer, hidden = model.layer_parameters, model.hidden_size
    dense = 2.0 * layer * batch.tokens
    attention = 2.0 * batch.tokens * batch.sequence_tokens * hidden  # causal: half of 4 t s h
    forward = (dense + attention) / machine.device_flop_s
    again = 1.0 if batch.checkpointing else 0.0
    head = 2.0 * model.vocabulary_size * hidden * batch.tokens / machine.device_flop_s
    table = model.vocabulary_size * hidden
    shapes = [("embedding", table, 0.0, 0.0)]
    shapes += [
        (f"layer {number}", layer, forward, (2.0 + again) * forward)
        for number in range(model.num_layers)
    ]
    shapes += [("head", hidden + (0 if model.tied else table), head, 2.0 * head)]
    return [
        price_unit(name, parameters, (forward_s, backward_s), machine)
        for name, parameters, forward_s, backward_s in shapes
    ]


def price_unit(name: str, parameters: int, device_s: tuple[float, float], machine: Machine) -> Unit:
    """Return a unit with the machine's times for its update and its way over the link.

    Args:
        name: Of the block.
        parameters: In it.
        device_s: Its forward and backward time.
        machine: Gives the host's and the link's rates.
    """
    return Unit(
        name=name,
        parameters=parameters,
        forward_s=device_s[0],
        backward_s=device_s[1],
        update_s=parameters / machine.host_parameters_s,
        down_s=GRAD_BYTES * parameters / machine.link_bytes_s,
        up_s=WEIGHT_BYTES * parameters / machine.link_bytes_s,
    )


def activation_bytes(model: Decoder, batch: Batch) -> float:
    """Return the device memory of activations and logits, by counting."""
    tokens, hidden = batch.micro_batch_tokens, model.hidden_size
    inside = 34.0 * tokens * hidden * max(1.0, model.intermediate_size / (4 * hidden))
    kept = 2.0 * tokens * hidden * model.num_layers + inside
    logits = 6.0 * tokens * model.vocabulary_size  # bf16 logits, fp32 loss
    return (kept if batch.checkpointing else inside * model.num_layers) + logits


_PROFILE_HEADER = ("name", "parameters", "forward_s", "backward_s")


def write_profile(path: Path, units: Sequence[tuple[str, int, float, float]]) -> None:
    """Write (name, parameters, forward_s, backward_s) rows, in forward order."""
    write_whole(path, csv_of(_PROFILE_HEADER, units))


def read_profile(path: Path, machine: Machine) -> list[Unit]:
    """Return the units of a measured profile.

    Raises:
        MissingFileError: The file does not exist.
        DataError: A column is missing, or a value is not a number or negative.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in _PROFILE_HEADER if name not in (reader.fieldnames or [])]
            if missing:
                raise DataError(f"{path} has no column {missing[0]}")
            units = []
            for row in reader:
                try:
                    parameters = int(row["parameters"])
                    times = (float(row["forward_s"]), float(row["backward_s"]))
                except (TypeError, ValueError) as error:
                    raise DataError(f"{path}:{reader.line_num}: {error}") from error
                if parameters < 0 or not all(math.isfinite(t) and t >= 0 for t in times):
                    raise DataError(f"{path}:{reader.line_num}: a value is negative or not finite")
                units.append(price_unit(row["name"], parameters, times, machine))
    except FileNotFoundError as error:
        raise MissingFileError(f"no profile {path}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text") from error
    if not units:
        raise DataError(f"{path} has no rows")
    return units


def check_machine(machine: Machine) -> None:
    """Return if every rate and size is positive.

    Raises:
        ConfigError: One is not.
    """
    for field in fields(Machine):
        value = getattr(machine, field.name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"machine.{field.name} {value} is not positive")
