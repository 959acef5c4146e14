"""`phalanx simulate network`: tables, JSON, a page, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.simulate_network import command
from phalanx.core.errors import UserError

TRAFFIC = """
step_s = 1.0
[[phase]]
name = "data"
pattern = "ring"
ranks = 128
stride = 8
rank_bytes = 1e9
"""


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.toml"
    path.write_text(TRAFFIC)
    return path


def call(*words: object, width: int = 160) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(command, [str(word) for word in words])


def small(traffic: Path, *words: object) -> Result:
    return call("--devices", 1024, "--traffic", traffic, "--draws", 1, "--alone", *words)


def test_a_table_has_the_ideal_network_first_and_says_why(traffic: Path) -> None:
    result = small(traffic, "--placement", "scattered", "--uplink-split", 2, "--queue-pairs", 1)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    ideal, own = (
        next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("an ideal", "this network")
    )
    assert ideal < own
    assert "data" in lines[own]
    assert "+" in lines[own]
    assert "2 ToR groups of 64 hosts" in result.output


def test_json_holds_the_same_numbers(traffic: Path) -> None:
    tree = json.loads(small(traffic, "--json", "--flap-s", 2).output)
    assert tree["devices"] == 1024
    assert tree["outcomes"][0]["lost_s"]["flap"] == pytest.approx(4.295, abs=1e-3)
    assert len(tree["outcomes"]) == 1


def test_scenarios_of_a_file(traffic: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[scenario]]\nname = "a bad day"\nflap_s = 100\n')
    result = small(traffic, "--scenario", path)
    assert "a bad day" in result.output
    assert "never" in result.output


def test_sources_are_printed(traffic: Path) -> None:
    assert "dcqcn.gain_ratio" in small(traffic, "--sources").output


def test_a_page_is_written(traffic: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "network.html"
    result = small(traffic, "--html", page, "--oversubscription", 2)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "this network" in text
    assert '"lost"' in text


def test_the_usual_job_is_predicted() -> None:
    tree = json.loads(call("--devices", 256, "--draws", 1, "--alone", "--json").output)
    assert tree["ideal_step_s"] > 10
    assert {phase["name"] for phase in tree["outcomes"][0]["phases"]} == {"data", "pipeline"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--devices", 500), "devices"),
        (("--devices", 520), "--devices"),
        (("--hashing", "md5"), "hashing"),
        (("--congestion", "reno"), "congestion"),
        (("--cluster", "nowhere"), "nowhere"),
        (("--oversubscription", 0), "--oversubscription = 0.0"),
        (("--queue-pairs", 0), "--queue-pairs = 0"),
        (("--retransmit-timeout", 40), "--retransmit-timeout = 40"),
        (("--flap-s", -1), "--flap-s = -1.0"),
        (("--draws", 0), "draws"),
        (("--layers", 5), "--layers = 5"),
        (("--fabric-hosts", 4), "--fabric-hosts = 4"),
        (("--uplink-split", 10**9), "--uplink-split = 1000000000"),
    ],
)
def test_nonsense_is_refused_with_a_cure(words: tuple[object, ...], named: str) -> None:
    first = () if "--devices" in words else ("--devices", 512)
    error = call(*first, "--alone", *words).exception
    assert isinstance(error, UserError)
    assert named in str(error)
    assert error.cure


def test_a_job_may_have_some_hosts_of_a_larger_fabric(traffic: Path) -> None:
    result = small(traffic, "--fabric-hosts", 1024, "--placement", "scattered")
    assert "1,024 devices on 128 of 1,024 hosts" in result.output
    assert "16 ToR groups" in result.output


def test_the_run_of_a_config_is_predicted() -> None:
    config = Path(__file__).parents[2] / "configs" / "plan" / "gpt-175b.toml"
    words = ("--devices", 512, "--alone", "--draws", 1, "--json", "parallel.tensor=8", "parallel.pipeline=8")
    tree = json.loads(call(config, *words).output)
    assert tree["outcomes"][0]["scenario"]["fabric"]["hosts"] == 64
    assert {phase["name"] for phase in tree["outcomes"][0]["phases"]} == {"data", "pipeline"}


def test_config_and_traffic_contradict_each_other(traffic: Path) -> None:
    error = call("some.toml", "--devices", 512, "--traffic", traffic).exception
    assert isinstance(error, UserError)
    assert "--traffic" in str(error)


def test_help_needs_no_numpy() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from phalanx.cli.main import main\n"
        "try: main(['simulate', 'network', '--help'])\n"
        "except SystemExit: pass\n"
        "found = {'numpy', 'torch', 'rich', 'pydantic', 'plotly'} & set(sys.modules)\n"
        "print(sorted(found)); sys.exit(bool(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    assert "--congestion" in done.stdout


def test_simulating_needs_no_torch(traffic: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from phalanx.cli.main import main\n"
        f"words = ['--devices', '1024', '--traffic', {str(traffic)!r}, '--draws', '1', '--alone']\n"
        "try: main(['simulate', 'network', *words])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_a_narrow_terminal_cuts_no_word_and_folds_no_number(traffic: Path) -> None:
    command_line = ("--devices", 1024, "--traffic", traffic, "--draws", 1, "--alone")
    lines = call(*command_line, width=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    phases = lines[next(place for place, line in enumerate(lines) if line.startswith("phases of")) :]
    assert not any(f"{word}…" in line for line in phases for word in ("fulle", "expo"))
    row = next(line for line in phases if line.startswith("data "))
    assert row.count(" %") == 2
    head = next(place for place, line in enumerate(lines) if line.startswith("fabric: "))
    assert lines[head + 1].startswith(" " * 9) and lines[head + 1].strip()


def test_where_nothing_matters_no_bar_is_long(tmp_path: Path) -> None:
    """Bars are of the largest loss, but of one per cent at least."""
    path = tmp_path / "traffic.toml"
    path.write_text(TRAFFIC.replace("1e9", "2e8"))
    told = call("--devices", 1024, "--traffic", path, "--draws", 1).stdout
    row = next(line for line in told.splitlines() if line.startswith("hosts scattered "))
    percent = float(row.partition("+")[2].split()[0])
    assert 0.1 < percent < 0.9
    assert row.count("█") == int(10 * percent)
