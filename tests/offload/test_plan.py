"""The closed form, the simulator and brute force agree; and nothing beats the bound."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierwise.cli.main import run
from tierwise.core.errors import DataError, MissingFileError, UsageError
from tierwise.offload.plan import (
    PLACES,
    Schedule,
    least_resident,
    lower_bound,
    make_plan,
    prefix_shares,
    reuse_distances,
    stall,
    time_at,
)
from tierwise.offload.simulate import simulate
from tierwise.offload.workload import (
    Batch,
    Machine,
    Unit,
    activation_bytes,
    count_units,
    decoder_named,
    machine_named,
    names_of,
    price_unit,
    read_profile,
    write_profile,
)

SCHEDULES: tuple[Schedule, ...] = ("speculate", "defer", "barrier")
MACHINE = Machine(
    device_flop_s=1e12, device_memory_bytes=1e9, link_bytes_s=4e4, host_parameters_s=1e4,
    host_memory_bytes=1e9,
)  # fmt: skip


def draw_units(seed: int, most: int = 10, machine: Machine = MACHINE) -> list[Unit]:
    draw = random.Random(seed)
    count = draw.randint(1, most)
    return [
        price_unit(
            f"u{number}",
            draw.choice([0, 100, 1000, draw.randint(1, 4000)]),
            (draw.choice([0.0, 0.05, draw.random() / 4]), draw.choice([0.0, 0.1, draw.random()])),
            machine,
        )
        for number in range(count)
    ]


def resident_choices(units: Sequence[Unit]) -> list[float]:
    total = sum(unit.parameters for unit in units)
    return [0.0, 0.3 * total, 0.8 * total]


def only_host(units: Sequence[Unit]) -> list[Unit]:
    return [
        Unit(name=u.name, parameters=u.parameters, forward_s=u.forward_s, backward_s=u.backward_s,
             update_s=u.update_s, down_s=0.0, up_s=0.0)
        for u in units
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_the_queue_reaches_the_bound_of_the_host_alone(seed: int, schedule: Schedule) -> None:
    units = only_host(draw_units(seed))
    chunk = max(1.0, sum(u.parameters for u in units) / 600)
    for resident in resident_choices(units):
        bound = lower_bound(units, resident, schedule)
        shares = prefix_shares(units, resident)
        period = simulate(units, shares, schedule, chunk_parameters=chunk).period_s
        assert period >= bound - 1e-9
        # a piece is not preempted: at most one stands in the way at each boundary
        assert period <= bound + 2 * chunk / MACHINE.host_parameters_s + 1e-9


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(12, 17))
def test_with_the_link_the_gap_is_a_few_pieces(seed: int, schedule: Schedule) -> None:
    units = draw_units(seed)
    chunk = max(1.0, sum(u.parameters for u in units) / 500)
    for resident in resident_choices(units):
        bound = lower_bound(units, resident, schedule)
        shares = prefix_shares(units, resident)
        period = simulate(units, shares, schedule, chunk_parameters=chunk).period_s
        assert period >= bound - 1e-9
        assert period <= bound + 6 * chunk / MACHINE.host_parameters_s + 1e-9


@pytest.mark.parametrize("seed", range(20, 24))
def test_no_set_of_whole_units_beats_the_bound(seed: int) -> None:
    units = draw_units(seed, most=6)
    for schedule in SCHEDULES:
        for subset in itertools.product((0.0, 1.0), repeat=len(units)):
            work = sum(u.parameters * s for u, s in zip(units, subset, strict=True))
            period = simulate(units, subset, schedule, chunk_parameters=200, steps=4).period_s
            assert period >= lower_bound(units, work, schedule) - 1e-9


@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_the_prefix_stalls_least_of_all_placements(seed: int, share: float) -> None:
    units = draw_units(seed)
    total = sum(u.parameters for u in units)
    resident = share * total
    prefix = prefix_shares(units, resident)
    suffix = prefix_shares(units[::-1], resident)[::-1]
    uniform = [share] * len(units)
    draw = random.Random(seed + 1)
    mixed = [draw.random() for _ in units]
    scale = resident / max(1e-9, sum(m * u.parameters for m, u in zip(mixed, units, strict=True)))
    mixed = [min(1.0, m * scale) for m in mixed]  # at most as much as the prefix
    for schedule, place in itertools.product(SCHEDULES, PLACES):
        best = stall(units, prefix, schedule, place)
        for other in (suffix, uniform, mixed):
            assert best <= stall(units, other, schedule, place) + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_first_come_first_served_is_not_better(seed: int) -> None:
    units = draw_units(seed, most=8)
    chunk = max(1.0, sum(u.parameters for u in units) / 400)
    for schedule in ("speculate", "defer"):
        shares = [0.0] * len(units)
        lowest = simulate(units, shares, schedule, chunk_parameters=chunk).period_s
        fifo = simulate(units, shares, schedule, order="fifo", chunk_parameters=chunk).period_s
        assert lowest <= fifo + 6 * chunk / MACHINE.host_parameters_s


@given(seed=st.integers(0, 10_000), schedule=st.sampled_from(SCHEDULES))
@settings(max_examples=100, deadline=None)
def test_the_least_resident_work_that_never_stalls(seed: int, schedule: Schedule) -> None:
    units = draw_units(seed)
    least = least_resident(units, schedule)
    device = sum(u.forward_s + u.backward_s for u in units)
    assert lower_bound(units, least + 1e-6, schedule) == pytest.approx(device, abs=1e-9)
    if least > 1:
        assert lower_bound(units, least * 0.98 - 1, schedule) > device


def test_windows_by_hand() -> None:
    units = [
        price_unit(name, 1000, times, MACHINE)
        for name, times in (("a", (1.0, 2.0)), ("b", (3.0, 4.0)), ("c", (5.0, 6.0)))
    ]
    assert reuse_distances(units, "speculate", "host") == [0.0, 3.0, 10.0]
    assert reuse_distances(units, "speculate", "up") == [0.0, 1.0, 4.0]
    assert reuse_distances(units, "defer", "host") == [0.0, 1.0, 4.0]
    assert reuse_distances(units, "defer", "down") == [0.0, 3.0, 10.0]
    assert reuse_distances(units, "barrier", "host") == [0.0, 2.0, 6.0]
    assert reuse_distances(units, "barrier", "up") == [0.0, 0.0, 0.0]
    # 0.1 s of update each: unit a has no window at all
    assert stall(units, [0.0] * 3, "speculate") == pytest.approx(0.1)
    assert stall(units, [1.0, 0.0, 0.0], "speculate") == 0.0


def test_the_steady_step_repeats() -> None:
    units = draw_units(3)
    shares = [0.0] * len(units)
    short = simulate(units, shares, "speculate", steps=5).period_s
    long = simulate(units, shares, "speculate", steps=12).period_s
    assert long == pytest.approx(short, rel=1e-9)


def test_simulated_lanes_never_do_two_things_at_once_and_weights_come_first() -> None:
    units = draw_units(5)
    done = simulate(
        units, prefix_shares(units, 500), "speculate", chunk_parameters=100, record=True
    )
    lanes: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for span in done.spans:
        lanes.setdefault((span.lane, span.track), []).append((span.start_ns, span.end_ns))
    for pieces in lanes.values():
        pieces.sort()
        assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(pieces))
    uploads = {s.name: s.end_ns for s in done.spans if s.kind == "upload" and s.step == 0}
    forward = {s.name: s.start_ns for s in done.spans if s.kind == "forward" and s.step == 1}
    assert uploads
    assert all(end <= forward[name] + 1 for name, end in uploads.items())


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.54), ("qwen2.5-7b", 7.62), ("llama-3.1-8b", 8.03)],
)
def test_parameter_counts_are_the_published_ones(name: str, billions: float) -> None:
    assert decoder_named(name).parameters / 1e9 == pytest.approx(billions, rel=0.003)


def test_units_add_up_to_the_model() -> None:
    for name in names_of("model"):
        model, machine = decoder_named(name), machine_named("h100-80gb")
        batch = Batch(
            tokens=8192, sequence_tokens=4096, micro_batch_tokens=4096, checkpointing=True
        )
        units = count_units(model, machine, batch)
        assert sum(unit.parameters for unit in units) == model.parameters
        assert activation_bytes(model, batch) > 0
        # 8 operations a parameter and token with recomputation, and attention on top
        dense = 8 * model.parameters * batch.tokens / machine.device_flop_s
        device = sum(unit.forward_s + unit.backward_s for unit in units)
        assert 0.75 * dense < device < 1.5 * dense


def test_a_config_json_is_read(tmp_path: Path) -> None:
    config = {
        "hidden_size": 1536, "num_hidden_layers": 28, "intermediate_size": 8960, "vocab_size":
        151936, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert decoder_named(str(tmp_path)) == decoder_named("qwen2.5-1.5b")
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(DataError, match="does not describe a decoder"):
        decoder_named(str(tmp_path / "config.json"))


def test_profiles_go_round(tmp_path: Path) -> None:
    rows = [("embedding", 1000, 0.0, 0.001), ("layer 0", 5000, 0.25, 0.5)]
    write_profile(tmp_path / "profile.csv", rows)
    units = read_profile(tmp_path / "profile.csv", MACHINE)
    assert [(u.name, u.parameters, u.forward_s, u.backward_s) for u in units] == rows
    assert time_at(units[1], "host") == 5000 / MACHINE.host_parameters_s
    for text, message in (
        ("name,parameters\n", "no column forward_s"),
        ("name,parameters,forward_s,backward_s\na,x,1,1\n", ":2:"),
        ("name,parameters,forward_s,backward_s\na,1,-1,1\n", "negative"),
        ("name,parameters,forward_s,backward_s\n", "no rows"),
    ):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            read_profile(tmp_path / "bad.csv", MACHINE)
    with pytest.raises(MissingFileError):
        read_profile(tmp_path / "none.csv", MACHINE)


def test_a_plan_that_does_not_fit_says_what_is_missing() -> None:
    units = [price_unit("a", 10**9, (1.0, 1.0), machine_named("h100-80gb"))]
    with pytest.raises(UsageError, match=r"too small even with everything offloaded: 5\.00 GB"):
        make_plan(units, schedule="speculate", device_memory_bytes=1e9, host_memory_bytes=1e12,
                  activation_bytes=0.0)  # fmt: skip
    with pytest.raises(UsageError, match=r"host is too small: 6\.00 GB more"):
        make_plan(units, schedule="speculate", device_memory_bytes=6e9, host_memory_bytes=10e9,
                  activation_bytes=0.0, resident_parameters=0)  # fmt: skip
    with pytest.raises(UsageError, match=r"resident parameters do not fit"):
        make_plan(units, schedule="speculate", device_memory_bytes=6e9, host_memory_bytes=1e12,
                  activation_bytes=0.0, resident_parameters=10**9)  # fmt: skip
    with pytest.raises(UsageError, match="no parameters"):
        make_plan([], schedule="defer", device_memory_bytes=1, host_memory_bytes=1,
                  activation_bytes=0)  # fmt: skip


def test_too_little_host_memory_for_shadows_means_defer() -> None:
    units = [price_unit("a", 10**9, (1.0, 1.0), machine_named("h100-80gb"))]
    plan = make_plan(units, schedule="speculate", device_memory_bytes=6e9, host_memory_bytes=20e9,
                     activation_bytes=0.0, resident_parameters=0)  # fmt: skip
    assert plan.schedule == "defer"
    assert plan.host.shadows == 0
    assert plan.host.total == 16e9


def test_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["offload", "plan", "--set", "model=qwen2.5-7b", "--set", "tokens=8192"]) == 0
    text = capsys.readouterr().out
    assert "trains on h100-80gb" in text
    assert "no schedule beats" in text
    asked = tmp_path / "ask.toml"
    asked.write_text('model = "qwen2.5-14b"\nmachine = "h200-141gb"\ndevice_memory = "100 GB"\n')
    assert run(["offload", "plan", str(asked), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step_s"] <= 1.01 * record["bound_s"]
    assert record["device_bytes"]["total"] <= 100e9
    assert sum(u["parameters"] for u in record["units"]) == record["parameters"]
    for arguments, code, sentence in (
        (["--set", "device_memory=8 GB"], 2, "too small even with everything offloaded"),
        (["--set", "modle=x"], 4, "unknown key modle"),
        (["--set", "machine=abacus"], 2, "no machine 'abacus'"),
        (["--set", "tokens=0"], 4, "tokens 0 is not positive"),
        (["--set", "host_memory=lots"], 4, "'lots' is not a size"),
        (["--set", "link_bytes_s=-1.0"], 4, "is not positive"),
        (["--set", "model=none.csv"], 6, "no profile none.csv"),
        (["none.toml"], 6, "no configuration file none.toml"),
    ):
        assert run(["offload", "plan", *arguments]) == code
        error = capsys.readouterr().err
        assert sentence in error
        assert len(error.strip().splitlines()) <= 2
    assert run(["offload", "machines"]) == 0
    assert "qwen2.5-7b" in capsys.readouterr().out


def test_planning_imports_neither_torch_nor_numba() -> None:
    code = (
        "import sys; from tierwise.cli.main import run; code = run(['offload', 'plan']); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numba', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0
