"""Hardware files: what comes along is whole, and what people write is checked."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.plan import hardware
from phalanx.plan.hardware import cluster_names, device_names, load_cluster, load_device

HERE = Path(hardware.__file__).parent
FILES = sorted(HERE.glob("*/*.toml"))


def marked(tree: Any) -> Iterator[dict[str, Any]]:
    """Every table with a value, however deep."""
    if isinstance(tree, dict):
        if "value" in tree:
            yield tree
        for inner in tree.values():
            yield from marked(inner)


def bare(tree: Any, path: str = "") -> Iterator[str]:
    """Numbers that stand outside such tables, but for counts."""
    for key, value in tree.items():
        if isinstance(value, dict) and "value" not in value:
            yield from bare(value, f"{path}{key}.")
        elif isinstance(value, int | float | list):
            yield f"{path}{key}"


def edited(tmp_path: Path, old: str, new: str, name: str = "devices/a100_sxm_80gb") -> Path:
    text = (HERE / f"{name}.toml").read_text()
    assert old in text
    path = tmp_path / f"{Path(name).name}.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_number_says_how_it_is_known_since_when_and_from_where(path: Path) -> None:
    tree = tomllib.loads(path.read_text())
    sources = tree.get("sources", {})
    numbers = list(marked(tree))
    assert numbers
    for number in numbers:
        assert number["mark"] in ("measured", "derived", "assumed")
        assert number.get("date") or sources[number["source"]]["date"]
    assert set(bare(tree)) <= {"devices", "devices_per_host", "nics_per_host", "gemm.half.cores", "gemm.fp32.cores"}
    unused = set(sources) - {number["source"] for number in numbers}
    assert not unused


@pytest.mark.parametrize("name", device_names())
def test_devices_that_come_along_answer(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    for precision in ("bf16", "fp16", "fp32"):
        assert 0 < device.gemm_s(512, 512, 512, precision) < 10
        assert 0 < device.attention_s(1e9, 512, 64, precision) < 10
    assert device.mark_of("gemm")[0] in ("derived", "assumed")
    for key in device.numbers:
        assert device.mark_of(key)[1].endswith(")")  # the date


@pytest.mark.parametrize("name", cluster_names())
def test_clusters_that_come_along_answer(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.hosts * cluster.devices_per_host >= cluster.devices
    assert 0 < cluster.collective_s("all_reduce", 1e8, 2) < 10
    assert 0 < cluster.send_s(1e6, cluster.devices_per_host) < 10
    for key in cluster.numbers:
        assert cluster.mark_of(key)[1].endswith(")")


def test_the_issues_devices_and_clusters_are_there() -> None:
    assert {"a100_sxm_80gb", "h100_sxm", "h200_sxm", "mi250x_gcd", "cpu_host"} <= set(device_names())
    assert {"selene", "megascale", "h100_400g", "h200_400g", "frontier", "cpu_host"} <= set(cluster_names())


REFUSED = [
    ("memory_bytes = {", "memory_gb = {", "memory_bytes"),
    ("value = 80e9", "value = 80", "give it in bytes"),
    ("value = 2.039e12", "value = 2039", "give it in bytes_per_s"),
    ("value = 312e12", "value = 312", "give it in flops_per_s"),
    ("value = 80e9", 'value = "80e9"', "write it as a number"),
    ('mark = "measured"', 'mark = "known"', "measured|derived|assumed"),
    (', source = "sheet"', "", "source"),
    ('source = "sheet"', 'source = "a data sheet"', "add date"),
    ('kind = "gpu"', 'kind = "tpu"', '"gpu" or "cpu"'),
    ('kind = "gpu"', 'kind = "gpu"\nkinds = 3', "did you mean kind"),
    ('kind = "gpu"', "kind = ", "correct it there"),
    ("cores = 108", "cores = 0", "whole number"),
    ("[gemm.half]", "[gemm.bf16]", "half"),
    ("value = 80e9, mark", "value = [80e9], mark", "write it as a number"),
]


@pytest.mark.parametrize(("old", "new", "cure"), REFUSED)
def test_what_cannot_be_right_is_refused_with_file_key_and_cure(tmp_path: Path, old: str, new: str, cure: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_device(edited(tmp_path, old, new))
    assert "a100_sxm_80gb.toml" in str(refusal.value)
    assert cure in str(refusal.value)


def test_a_missing_key_is_not_confused_with_one_that_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"memory_bytes: is missing; add it in bytes \(memory_gb is no known key"):
        load_device(edited(tmp_path, "memory_bytes = {", "memory_gb = {"))


def test_a_missing_key_says_which_unit_and_points_at_its_misspelling(tmp_path: Path) -> None:
    path = edited(tmp_path, "memory_bytes_per_s = {", "memory_bytes_s = {")
    with pytest.raises(
        UserError, match=r"memory_bytes_per_s: is missing; add it in bytes_per_s \(memory_bytes_s is no"
    ):
        load_device(path)


def test_tiles_must_have_their_five_numbers(tmp_path: Path) -> None:
    rows = "[[128, 128, 1, 0.8, 128],\n  [64, 64, 1, 0.6, 128]]"
    with pytest.raises(UserError, match="rows of rows, columns, splits, share, start_columns"):
        load_device(edited(tmp_path, rows, "[[128, 128]]", "devices/mi250x_gcd"))


def test_a_correction_must_fit_its_axes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a row for each of correction_waves"):
        load_device(edited(tmp_path, "correction_waves = { value = [0.007812, ", "correction_waves = { value = ["))


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(UserError, match="a100_sxm_80gb"):
        load_device("a100")
    with pytest.raises(UserError, match="selene"):
        load_cluster("selen")
    with pytest.raises(UserError, match="cannot be read"):
        load_device("/nowhere/device.toml")


def test_a_cluster_of_ones_own_names_files_beside_it(tmp_path: Path) -> None:
    text = (HERE / "clusters" / "selene.toml").read_text()
    (tmp_path / "card.toml").write_text((HERE / "devices" / "h100_sxm.toml").read_text())
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace('device = "a100_sxm_80gb"', 'device = "card.toml"'))
    cluster = load_cluster(mine, devices=16)
    assert (cluster.name, cluster.device.name, cluster.hosts) == ("mine", "card", 2)


def test_a_network_of_ones_own_needs_no_protocols(tmp_path: Path) -> None:
    cluster = load_cluster("frontier", 16)
    steps = 2 * (16 / 8 - 1)
    moved_s = 2 * 15 / 16 * 1e9 / (8 * cluster.device_bytes_per_s)
    assert cluster.network.collective_s("all_reduce", 1e9, 16, 8) == pytest.approx(
        moved_s + steps * cluster.value("network.latency_s")
    )


@pytest.mark.parametrize("devices", [0, 12, -8])
def test_devices_must_fill_whole_hosts(devices: int) -> None:
    with pytest.raises(UserError, match="whole hosts"):
        load_cluster("selene", devices)


def test_fewer_devices_than_a_host_has_are_one_host() -> None:
    assert load_cluster("selene", 3).hosts == 1


def test_unknown_numbers_list_the_known_ones() -> None:
    with pytest.raises(UserError, match="memory_bytes"):
        load_device("h100_sxm").number("memory")
    with pytest.raises(UserError, match=r"network\.latency_s"):
        load_cluster("selene").number("latency")
