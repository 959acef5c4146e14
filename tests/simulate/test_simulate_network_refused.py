"""Files about a network that cannot be meant: each is refused with file or key and cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.simulate import network_settings
from phalanx.simulate.network_scenario import make_scenario, read_scenarios
from phalanx.simulate.network_settings import network_of
from phalanx.simulate.traffic import read_traffic

CLUSTER = load_cluster("megascale", 1024)
BASE = make_scenario("now", network_of(CLUSTER), {})
FABRIC = (Path(network_settings.__file__).parent / "fabrics" / "default.toml").read_text()
PHASE = """step_s = 1
[[phase]]
name = "data"
pattern = "ring"
ranks = 16
stride = 8
rank_bytes = 1e9
"""


def mine(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no list of scenarios"),
        ("scenario = []", "is no list of scenarios"),
        ("scenario = [1]", "is no list of scenarios"),
        ('scenario = ["name"]', "is no list of scenarios"),
        ('[scenario]\nname = "a"', "is no list of scenarios"),
        ("[[scenario]]\nflap_s = 1", "is no list of scenarios"),
        ("[[scenario]]\nname = { a = 1 }", "is no list of scenarios"),
        ("x = " + "[" * 10_000, "is no TOML"),
        *(
            (f'[[scenario]]\nname = "a"\n{line}', said)
            for line, said in (
                ("speed = 3", "speed: is nothing that can be changed; write one of hashing"),
                ("hashing = 3", "hashing = 3: is no such value; write a name in quotes"),
                ('hashing = "md5"', "hashing = 'md5': is not known"),
                ("queue_pairs = nan", "queue_pairs = nan: is no such value; write a whole number below"),
                ("queue_pairs = [1]", "queue_pairs = [1]: is no such value"),
                ("queue_pairs = true", "queue_pairs = True: is no such value"),
                ("queue_pairs = 65", "queue_pairs = 65"),
                ("layers = 2.0", "layers = 2.0: is no such value"),
                ("hosts = 200.5", "hosts = 200.5: is no such value"),
                ("radix = 10000000000", "radix = 10000000000: is no such value"),
                ("radix = 1000000", "links; take switches with fewer ports"),
                ("rail_optimised = 3", "rail_optimised = 3: is no such value; write true or false"),
                ("adaptive_retransmit = 3", "adaptive_retransmit = 3: is no such value"),
                ("uplink_split = 1.5", "uplink_split = 1.5: is no such value"),
                ("flap_s = 2024-01-01", "flap_s = datetime.date(2024, 1, 1): is no such value"),
                ("flap_s = -1", "flap_s = -1"),
                ("tor_oversubscription = nan", "tor_oversubscription = nan"),
            )
        ),
    ],
)
def test_scenarios(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_scenarios(mine(tmp_path, text), BASE)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("step_s = 1", "", "is no description of traffic"),
        ("step_s = 1", "step_s = 1\nsteps = 3", "is no description of traffic"),
        ("step_s = 1", "step_s = nan", "step_s = nan"),
        ("[[phase]]", "[phase]", "is no description of traffic"),
        (PHASE, "step_s = 1", "phases: nothing is sent; add a phase"),
        (PHASE, "step_s = 1\nphase = [1]", "is no description of traffic"),
        ('name = "data"', "name = 3", "phase[0].name: is no text; write it in quotes"),
        ('"ring"', "3", "phase[0].pattern: is no text"),
        ('"ring"', '"star"', "pattern = 'star': is no pattern; write one of ring"),
        ("ranks = 16", "ranks = 2.5", "phase[0].ranks = 2.5: is no number; write it as a whole number"),
        ("ranks = 16", "ranks = 0", "ranks = 0: is no size"),
        ("ranks = 16", "rank = 16", "is unknown or missing"),
        ("1e9", "-1e9", "rank_bytes = -1000000000.0"),
        ("1e9", "inf", "rank_bytes = inf"),
        ("1e9", "1e9\nexposed_ratio = 2", "exposed_ratio = 2"),
        ("1e9", "1e9\ncover_s = inf", "cover_s = inf"),
    ],
)
def test_traffic(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_traffic(mine(tmp_path, PHASE.replace(old, new, 1)))
    assert said in str(refusal.value)


def number(key: str, value: str) -> tuple[str, str]:
    return rf"(?m)^{key} = \{{ value = [^,]*", f"{key} = {{ value = {value}"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ((r"(?m)^layers.*", "layers = 7"), "layers = 7"),
        ((r"(?m)^layers.*", "layers = true"), "layers = True: is no such value; write a whole number"),
        ((r"(?m)^layers.*", "layers = 3\ncolours = 3"), "colours = 3: is no known key"),
        ((r"(?m)^radix.*", 'radix = "many"'), "radix = 'many'"),
        ((r"(?m)^radix.*", "radix = 1000000000000"), "radix = 1000000000000: is no such value"),
        ((r"(?m)^rail_optimised.*", "rail_optimised = 1"), "rail_optimised = 1: is no such value; write true or false"),
        (number("queue_pairs", "1.5"), "fabric.queue_pairs = 1.5: cannot be computed with; give a whole number"),
        (number("mtu_bytes", "1"), "fabric.mtu_bytes = 1.0: cannot be computed with; give a number from 64"),
        (number("gain_ratio", "0"), "dcqcn.gain_ratio = 0.0: cannot be computed with"),
        (number("fast_recovery", "-1"), "dcqcn.fast_recovery = -1.0"),
        (number("alpha_timer_s", "0"), "dcqcn.alpha_timer_s = 0.0"),
        (number("high_s", "1e-6"), "ecn.high_s = 1e-06: is no more than where it begins; give more than low_s"),
        (number("flow_high", "0.01"), "swift.flow_high = 0.01: is no more than where it begins"),
        (number("retries", "9"), "retransmit.retries = 9.0"),
        (number("buffer_bytes", "nan"), "fabric.buffer_bytes = nan"),
    ],
)
def test_fabrics(tmp_path: Path, edit: tuple[str, str], said: str) -> None:
    broken, found = re.subn(*edit, FABRIC, count=1)
    assert found
    with pytest.raises(UserError) as refusal:
        network_of(CLUSTER, mine(tmp_path, broken))
    assert "mine.toml: " in str(refusal.value) or "layers" in said
    assert said in str(refusal.value)
