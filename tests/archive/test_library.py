"""The simulated library: written once, time accounted, every move an event."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import pytest

from tierwise.archive.faults import Faults
from tierwise.archive.library import (
    DiscState,
    Geometry,
    SimulatedLibrary,
    VirtualClock,
    load_timings,
)
from tierwise.core.errors import (
    DataError,
    MissingFileError,
    StateError,
    StorageFullError,
    UsageError,
)
from tierwise.core.facts import FactKind

SMALL = Geometry(disc_capacity=1 << 20, layers=3, trays=2, discs=2, drive_sets=1)


@pytest.fixture
def library(tmp_path: Path) -> SimulatedLibrary:
    return SimulatedLibrary.create(tmp_path / "library", SMALL, clock=VirtualClock())


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.iso"
    path.write_bytes(bytes(range(256)) * 2000)
    return path


def test_slots_and_places_match_one_to_one(library: SimulatedLibrary) -> None:
    places = [SMALL.place(slot) for slot in range(1, SMALL.num_slots + 1)]
    assert len(set(places)) == 12
    for slot in range(1, 13):
        assert library.slot_of(library.path_of(slot)) == slot
    for slot in (0, 13):
        with pytest.raises(UsageError):
            library.path_of(slot)


def test_a_disc_is_written_once(library: SimulatedLibrary, image: Path) -> None:
    assert library.states() == {}
    library.burn(3, image)
    assert library.states() == {3: DiscState.SEALED}
    assert library.path_of(3).stat().st_mode & 0o777 == 0o444
    with pytest.raises(StateError, match="not blank"):
        library.burn(3, image)
    assert library.pread(3, 256, 4) == bytes([0, 1, 2, 3])
    assert library.size_bytes(3) == image.stat().st_size
    with pytest.raises(MissingFileError):
        library.pread(4, 0, 1)


def test_a_stopped_burn_spoils_the_disc(library: SimulatedLibrary, image: Path) -> None:
    Faults(library).stop_next_burn(100_000)
    with pytest.raises(StateError, match="stopped after"):
        library.burn(1, image)
    assert library.state_of(1) is DiscState.SPOILED
    assert library.size_bytes(1) == 100_000
    with pytest.raises(StateError, match="spoiled"):
        library.burn(1, image)
    library.burn(2, image)
    assert library.state_of(2) is DiscState.SEALED


def test_an_image_larger_than_the_disc(library: SimulatedLibrary, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(StorageFullError):
        library.burn(1, large)
    assert library.states() == {}


def test_time_is_the_sum_of_the_events_and_of_reading(
    library: SimulatedLibrary, image: Path
) -> None:
    facts = {key: fact.value for key, fact in load_timings().items()}
    library.burn(1, image)
    events = library.events()
    assert [e["event"] for e in events] == ["turn roller", "move arm", "separate discs", "burn"]
    assert library.clock.now_s == pytest.approx(sum(e["seconds"] for e in events), abs=1e-4)
    rate = facts["burn_25_speed"] * facts["bd_1x_mb_s"]
    assert events[-1]["seconds"] == pytest.approx(0.512 / rate, abs=1e-6)
    before = library.clock.now_s
    library.pread(1, 0, 100_000)
    first = library.clock.now_s - before
    library.pread(1, 100_000, 100_000)
    assert first == pytest.approx(facts["seek_s"] + 0.1 / facts["read_25_mb_s"])
    assert library.clock.now_s - before - first == pytest.approx(0.1 / facts["read_25_mb_s"])


def test_trays_change_when_the_drives_are_full(library: SimulatedLibrary, image: Path) -> None:
    library.burn(1, image)
    library.burn(12, image)
    kinds = [event["event"] for event in library.events()]
    assert kinds.count("collect discs") == 1
    assert library.load_seconds(12) == 0
    wait = library.load_seconds(1)
    before = library.clock.now_s
    library.pread(1, 0, 0)
    seek = load_timings()["seek_s"].value
    assert library.clock.now_s - before == pytest.approx(wait + seek)
    times = [event["time_s"] for event in library.events()]
    assert times == sorted(times)


def test_time_goes_on_when_the_library_is_opened_again(
    library: SimulatedLibrary, image: Path
) -> None:
    library.burn(1, image)
    again = SimulatedLibrary.open(library.root)
    assert again.clock.now_s == pytest.approx(library.clock.now_s)
    assert again.load_seconds(1) == 0
    late = SimulatedLibrary.open(library.root, clock=VirtualClock(1e6))
    assert late.clock.now_s == 1e6


def test_broken_drives(tmp_path: Path, image: Path) -> None:
    library = SimulatedLibrary.create(
        tmp_path / "two", Geometry(disc_capacity=1 << 20, layers=2, trays=1, discs=1)
    )
    library.burn(1, image)
    Faults(library).break_drives(1)
    library.pread(1, 0, 8)
    assert library.events()[-1]["drive_set"] == 2
    Faults(library).break_drives(2)
    with pytest.raises(StateError, match="no drive set works"):
        library.pread(1, 0, 8)
    with pytest.raises(UsageError):
        Faults(library).break_drives(3)


def test_faults_are_on_the_medium(library: SimulatedLibrary, image: Path) -> None:
    faults, body = Faults(library), image.read_bytes()
    for slot in range(1, 7):
        library.burn(slot, image)
    faults.destroy(1)
    assert library.state_of(1) is DiscState.GONE
    with pytest.raises(StateError):
        library.burn(1, image)
    offsets = faults.flip_bits(2, num_bits=5, seed=9)
    changed = library.path_of(2).read_bytes()
    assert [i for i, (a, b) in enumerate(zip(changed, body, strict=True)) if a != b] == offsets
    faults.truncate(3, 5000)
    assert library.pread(3, 4998, 10) == body[4998:5000]
    faults.flip_bit(4, 0)
    faults.swap(4, 5)
    assert library.pread(5, 0, 1) == b"\1"
    assert library.pread(4, 0, 1) == b"\0"
    faults.spoil_sectors(6, [2])
    assert library.pread(6, 0, 4096) == body[:4096]
    for offset, length in ((4096, 1), (0, 4097), (6000, 5000)):
        with pytest.raises(OSError, match="cannot be read") as caught:
            library.pread(6, offset, length)
        assert caught.value.errno == errno.EIO
    assert all(library.path_of(s).stat().st_mode & 0o777 == 0o444 for s in range(2, 7))


def test_create_and_open_refuse(library: SimulatedLibrary, tmp_path: Path) -> None:
    with pytest.raises(StateError):
        SimulatedLibrary.create(library.root, SMALL)
    with pytest.raises(MissingFileError):
        SimulatedLibrary.open(tmp_path / "nowhere")
    (library.root / "geometry.json").write_text('{"disc_capacity": 5, "colour": 1}')
    with pytest.raises(DataError):
        SimulatedLibrary.open(library.root)
    with pytest.raises(UsageError):
        Geometry(disc_capacity=0)


def test_every_timing_has_a_public_source_and_estimates_say_so() -> None:
    facts = load_timings()
    for fact in facts.values():
        public = any(word in fact.source for word in ("http", "doi:", "data sheets"))
        assert public, fact.key
        assert (fact.kind is FactKind.ESTIMATE) == fact.source.startswith("our estimate")


def test_a_whole_rack_in_the_default_shape() -> None:
    """One roller of 85 layers x 6 trays x 12 discs; the farthest tray loads in about 68 s."""
    geometry = Geometry(disc_capacity=25_000_000_000)
    assert geometry.num_slots == 6120
    values = {key: fact.value for key, fact in load_timings().items()}
    far = values["roller_turn_s"] + 84 * values["arm_layer_s"] + 12 * values["separate_disc_s"]
    assert 60 < far < 75
    assert len({geometry.place(slot) for slot in range(1, 6121)}) == 6120
    assert all(a < b for a, b in itertools.pairwise([geometry.place(s) for s in range(1, 200)]))
