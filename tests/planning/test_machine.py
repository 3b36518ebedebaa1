"""Measured speeds: interpolation between measurements, and the file that stores them."""

import json
from pathlib import Path

import pytest
import torch

from hf_hybrid_cache.planning import Machine, this_machine
from hf_hybrid_cache.planning.machine import (
    CacheSpeed,
    DeviceSpeed,
    Speeds,
    SpeedsFileError,
    WeightSpeed,
    load_speeds,
    save_speeds,
    speeds_path,
)

CACHES = {"stock": CacheSpeed(((100, 1.0), (200, 3.0)), 5.0), "dynamic": CacheSpeed(((100, 1.0), (300, 2.0)), 6.0)}
WEIGHTS = {8: WeightSpeed(4e8, 7e11), 4: WeightSpeed(5e8)}
SPEEDS = Speeds(DeviceSpeed(1e9, 0.25, 1e12, CACHES, WEIGHTS), DeviceSpeed(9e9, 0.0, None, {}), 2e9, 1e-4)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HYBRID_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("size", "seconds"), [(100, 1.0), (150, 1.5), (200, 2.0), (300, 5.0), (500, 11.0), (50, 0.5), (0, 0.0)]
)
def test_step_seconds_when_between_or_beyond_sizes_then_are_linear(size: int, seconds: float):
    assert CacheSpeed(((100, 1.0), (200, 2.0), (300, 5.0)), 1.0).step_seconds(size) == pytest.approx(seconds)


def test_seconds_are_never_negative():
    assert CacheSpeed(((100, 1.0), (200, 9.0)), 1.0).step_seconds(0) == 0.0


@pytest.mark.parametrize("steps", [(), ((1, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0))])
def test_cache_speed_when_sizes_are_few_or_unordered_then_is_refused(steps: tuple):
    with pytest.raises(ValueError, match="steps must be of two or more sizes"):
        CacheSpeed(steps, 1.0)


def test_speeds_are_kept_for_each_dtype(home: Path):
    assert load_speeds(torch.bfloat16) == Speeds()
    path = save_speeds(torch.bfloat16, SPEEDS)
    assert path == speeds_path() == home / "speeds.json"
    assert load_speeds(torch.bfloat16) == SPEEDS
    assert load_speeds(torch.float32) == Speeds()
    save_speeds(torch.float32, Speeds(DeviceSpeed(1.0)))
    assert load_speeds(torch.float32) == Speeds(DeviceSpeed(1.0))
    assert load_speeds(torch.bfloat16) == SPEEDS
    assert [path.name for path in home.iterdir()] == ["speeds.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace("0.25", '"slow"'),
        lambda text: text.replace("1000000000.0", "NaN"),
        lambda text: text.replace("1000000000.0", "0.0"),
        lambda text: text.replace("2000000000.0", "-1.0"),
        lambda text: text.replace("weight_bytes_per_second", "bytes"),
        lambda text: text.replace('"steps"', '"step"'),
        lambda text: text.replace("300", "100"),
        lambda text: text.replace("400000000.0", "-1.0"),
        lambda text: text.replace('"8"', '"eight"'),
        lambda text: text.replace('"bytes_per_second"', '"bytes"'),
    ],
)
def test_a_damaged_file_is_named_and_the_next_measurement_replaces_it(damage):
    path = save_speeds(torch.bfloat16, SPEEDS)
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(
        SpeedsFileError, match=r"is damaged .* and is not used\. Measure again with --calibrate\."
    ) as error:
        load_speeds(torch.bfloat16)
    assert str(error.value).startswith(str(path))
    save_speeds(torch.bfloat16, SPEEDS)
    assert load_speeds(torch.bfloat16) == SPEEDS


def test_without_a_home_no_speeds_are_known(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("HF_HYBRID_CACHE_HOME", ""), ("XDG_CACHE_HOME", ""), ("HOME", "~")):
        monkeypatch.setenv(name, value)
    assert load_speeds(torch.float32) == Speeds()


def test_speeds_file_when_older_than_quantized_weights_then_loads_others():
    path = save_speeds(torch.bfloat16, SPEEDS)
    content = json.loads(path.read_text())
    for device in ("host", "device"):
        del content["speeds"]["torch.bfloat16"][device]["quantized_weights"]
    path.write_text(json.dumps(content))
    loaded = load_speeds(torch.bfloat16)
    assert loaded.host == DeviceSpeed(1e9, 0.25, 1e12, CACHES)
    assert loaded.device == SPEEDS.device


@pytest.mark.parametrize(
    ("name", "value"), [("schema", 0), ("cpu", "Abacus"), ("gpu", "Voodoo"), ("hf_hybrid_cache", "0.0.1")]
)
def test_speeds_file_when_of_another_machine_then_is_named_and_not_mixed(name: str, value: object):
    path = save_speeds(torch.float32, SPEEDS)
    content = json.loads(path.read_text())
    content["measured_on"][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(SpeedsFileError, match=f"was measured with {name} {value}, not .* Measure again"):
        load_speeds(torch.float32)
    save_speeds(torch.bfloat16, SPEEDS)
    assert load_speeds(torch.float32) == Speeds()


def test_machine_when_memory_is_not_given_then_has_free_memory():
    assert this_machine(5, 7, Speeds()) == Machine(5, 7, Speeds())
    here = this_machine(None, None, Speeds())
    assert here.host_bytes > 0
    assert (here.device_bytes > 0) == torch.cuda.is_available()
