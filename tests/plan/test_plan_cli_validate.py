"""`phalanx plan validate`: every row of every table, its error, the null model beside it, and what was assumed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.plan_command import command as plan
from phalanx.core.errors import UserError
from phalanx.plan.validate.published import TABLES, read_table


def _validate(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(plan, ["validate", *arguments])


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two of the tables, one of them long."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("korthikanti_table5", "vtrain_multi_node"):
        shutil.copy(TABLES / f"{name}.csv", folder)
    return folder


def test_every_row_is_there_and_means_are_means(tables: Path) -> None:
    told = json.loads(_validate("--tables", str(tables), "--no-spread", "--json").output)
    assert [table["table"] for table in told["tables"]] == ["korthikanti_table5", "vtrain_multi_node"]
    for table in told["tables"]:
        rows = read_table(tables / f"{table['table']}.csv")
        assert [(row["row_id"], row["measured_s"]) for row in table["rows"]] == [(r.row_id, r.step_s) for r in rows]
        errors = [row["predicted_s"] / row["measured_s"] - 1 for row in table["rows"]]
        assert table["mean_error_ratio"] == pytest.approx(sum(map(abs, errors)) / len(errors))
        assert table["max_error_ratio"] == pytest.approx(max(map(abs, errors)))


def test_of_long_tables_the_worst_rows_are_shown(tables: Path) -> None:
    short, whole = _validate("--tables", str(tables)), _validate("--tables", str(tables), "--rows", "--no-spread")
    shown = re.findall(r"^vtrain-multi-\d+ .*? ([+-][\d.]+) % ", short.output, flags=re.MULTILINE)
    every = re.findall(r"^vtrain-multi-\d+ .*? ([+-][\d.]+) % ", whole.output, flags=re.MULTILINE)
    assert len(every) == len(read_table(tables / "vtrain_multi_node.csv")) > len(shown) == 12
    left_out = sorted(map(abs, map(float, every)))[:-12]
    assert min(abs(float(error)) for error in shown) >= left_out[-1]
    assert "with other choices: sequence_parallel = True: " in short.output
    assert "with other choices" not in whole.output


def test_a_page_has_a_table_that_opens_for_each_of_them(tables: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert _validate("--tables", str(tables), "--html", str(file)).exit_code == 0
    page = file.read_text()
    assert re.findall(r"<summary>([^:<]*): mean", page) == ["Korthikanti et al., table 5", "vTrain, several hosts"]
    opened = page.partition("<details>")[2]
    assert [opened.count(f">{row.row_id}<") for row in read_table(tables / "korthikanti_table5.csv")] == [1] * 9
    assert len(re.findall(r">vtrain-multi-\d+<", opened)) == 12
    figures = json.loads(re.findall(r"^const figures = (.*);$", page, flags=re.MULTILINE)[0])
    points = {trace["name"]: len(trace["x"]) for trace in figures["errors"]["data"]}
    assert points == {"Korthikanti et al., table 5": 9, "vTrain, several hosts": 54}


@pytest.mark.slow
def test_all_tables_and_the_ablation_are_told_and_written(tmp_path: Path) -> None:
    done = _validate("--no-spread", "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 0
    assert re.search(r"^MegaScale, table 2: Megatron-LM +8 +[\d.]+ % ", done.output, flags=re.MULTILINE)
    assert re.search(r"^LAMB, batch of 768 +[\d.]+ +[+-][\d.]+ +65\.3 +\+3\.0$", done.output, flags=re.MULTILINE)
    assert 'id="errors"' in (tmp_path / "page.html").read_text()


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    error = _validate("--tables", str(tmp_path)).exception
    assert isinstance(error, UserError) and "no table in it has known settings" in str(error)


COLUMNS = "row_id,layers,hidden,heads,vocab,seq,global_batch,micro_batch,n_gpus,tp,pp,vpp,dp,recompute,seq_parallel"
FIRST = "a,32,4096,32,32000,4096,128,1,64,8,1,1,8,none,yes"


def _own(folder: Path, *rows: str, more: str = "") -> Path:
    """A file of one's own steps."""
    file = folder / "mine.csv"
    file.write_text("\n".join([f"{COLUMNS},iter_time_s{more}", *rows]) + "\n")
    return file


def test_steps_of_ones_own_say_their_efficiency(tmp_path: Path) -> None:
    """Given to a prediction, it meets them: at the median exactly."""
    judged = ("--cluster", "selene", "--software", "megatron-core")
    plain = json.loads(_validate("--tables", str(_own(tmp_path, f"{FIRST},1.0")), *judged, "--json").output)
    step_s = plain["rows"][0]["predicted_s"]
    rows = [
        f"{FIRST.replace('a,', f'{name},', 1)},{times * step_s}" for name, times in (("b", 1.2), ("c", 1.25), ("d", 2))
    ]
    file = _own(tmp_path, *rows)
    told = json.loads(_validate("--tables", str(file), *judged, "--json").output)
    assert told["efficiency_ratio"] == pytest.approx(0.8)
    assert [row["inside"] for row in told["rows"]] == [True, True, False] and told["inside_ratio"] == pytest.approx(
        2 / 3
    )
    assert plain["rows"][0]["interval_s"][0] < step_s < plain["rows"][0]["interval_s"][1]
    errors = [row["error_with_efficiency_ratio"] for row in told["rows"]]
    assert errors == pytest.approx([1 / 0.96 - 1, 0.0, 0.625 - 1], abs=1e-9)
    shown = _validate("--tables", str(file), *judged).output
    assert "efficiency 0.800, the median of 3 steps: give --efficiency 0.800" in " ".join(shown.split())


def test_rows_may_say_more_than_those_of_publications(tmp_path: Path) -> None:
    more = ",cluster,software,precision,zero,model,optimizer,tensor_overlap"
    rows = [f"{FIRST},1.0,h100_400g,megatron-core,bf16,1,{model},adamw,chunked" for model in ("gpt", "llama")]
    told = json.loads(_validate("--tables", str(_own(tmp_path, *rows, more=more)), "--json").output)
    gpt, llama = (row["predicted_s"] for row in told["rows"])
    assert llama > 1.1 * gpt  # its MLP has a gate
    bare = json.loads(
        _validate("--tables", str(_own(tmp_path, f"{FIRST},1.0")), "--cluster", "selene", "--json").output
    )
    assert bare["rows"][0]["predicted_s"] > 1.5 * gpt  # an A100, and Phalanx


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("4096", "wide"), "row a: hidden = 'wide': is no such number"),
        ((",8,none", ",0,none"), "row a: dp = '0': is no such number"),
        ((",8,none", ",4,none"), "tp x cp x pp x dp are 32 ranks"),
        (("none", "some"), "row a: recompute = 'some': is not known"),
        (("yes", "maybe"), "row a: seq_parallel = 'maybe': is not known"),
        ((",1.0", ",-1"), "row a: iter_time_s = '-1': is no time"),
        ((",1.0", ","), "row a: iter_time_s = '': is no time"),
        (("128,1,64", "129,1,64"), "sequences of a step do not divide by 8"),
        (("a,32,", "a,"), "row a: dp = 'none': is no such number"),
    ],
)
def test_a_bad_row_is_refused_by_its_name(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    file = _own(tmp_path, f"{FIRST},1.0".replace(*change, 1))
    error = _validate("--tables", str(file), "--cluster", "selene").exception
    assert isinstance(error, UserError) and "row a" in str(error) and said in str(error), str(error)


def test_what_a_row_of_ones_own_needs_is_said(tmp_path: Path) -> None:
    file = _own(tmp_path, f"{FIRST},1.0")
    for arguments, said in (
        ([], "add a column cluster, or give --cluster"),
        (["--cluster", "nowhere"], "is none of the clusters"),
        (["--cluster", "selene", "--software", "none"], "is no program that can be predicted"),
        (["--cluster", "selene", "--html", str(tmp_path / "page.html")], "is about published tables"),
    ):
        error = _validate("--tables", str(file), *arguments).exception
        assert isinstance(error, UserError) and said in str(error), str(error)
    for text, said in ((f"{COLUMNS},iter_time_s\n", "has no row"), ("layers\n1\n", "has no column")):
        file.write_text(text)
        error = _validate("--tables", str(file), "--cluster", "selene").exception
        assert isinstance(error, UserError) and said in str(error), str(error)
    error = _validate("--tables", str(tmp_path / "none.csv")).exception
    assert isinstance(error, UserError) and "no such table" in str(error)
    file = _own(tmp_path, f"{FIRST},1.0,fp7", more=",precision")
    error = _validate("--tables", str(file), "--cluster", "selene").exception
    assert (
        isinstance(error, UserError) and "row a: precision = 'fp7': is not known" in str(error) and "bf16" in error.cure
    )


LLAMA_7B = """
[data]
sequence_length = 2048
[model]
vocab_size = 32000
layers = 32
hidden = 4096
heads = 32
mlp_hidden = 11008
activation = "swiglu"
residual = "{residual}"
[train]
tokens = 1e11
global_batch = 512
precision = "bf16"
micro_batch = 2
recompute = "none"
compile = {compile}
[parallel]
shard = 8
zero = 1
"""
"""The row of the test below, as a config."""


@pytest.mark.parametrize(("residual", "compiled"), [("float32", True), ("compute", True), ("float32", False)])
def test_a_row_that_says_what_a_config_says_is_predicted_like_it(tmp_path: Path, residual: str, compiled: bool) -> None:
    """So a run that goes exactly as `phalanx plan` says has the efficiency 1."""
    config = tmp_path / "llama.toml"
    config.write_text(LLAMA_7B.format(residual=residual, compile=str(compiled).lower()))
    words = [str(config), "--cluster", "h100_400g", "--json"]
    told = [json.loads(CliRunner().invoke(plan, [*words, *more]).output) for more in ((), ("--software", "phalanx"))]
    assert told[0]["step_s"] == told[1]["step_s"]
    row = f"a,32,4096,32,32,11008,32000,2048,512,2,8,1,1,1,8,none,yes,{told[0]['step_s']},llama"
    file = tmp_path / "mine.csv"
    head = "row_id,layers,hidden,heads,kv_heads,ffn,vocab,seq,global_batch,micro_batch,n_gpus,tp,pp,vpp,dp,recompute"
    file.write_text(
        f"{head},seq_parallel,iter_time_s,model,residual,compile\n{row},{residual},{'yes' if compiled else 'no'}\n"
    )
    found = json.loads(_validate("--tables", str(file), "--cluster", "h100_400g", "--json").output)
    assert found["efficiency_ratio"] == pytest.approx(1.0, rel=1e-9)
    assert found["rows"][0]["inside"] is None  # of our own program no steps were judged


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("128,1,64", "129,1,64"), ["global_batch 129 sequences", "a multiple of dp is 128"]),
        (("128,1,64", "128,3,64"), ["micro_batch = 3", "one of 1, 2, 4, 8, 16"]),
        (("1.0", "1e300"), ["iter_time_s = '1e300': is no time"]),
        (("1.0", "1,0"), ["more cells than there are columns"]),
    ],
)
def test_a_bad_row_is_told_in_the_words_of_its_columns(
    tmp_path: Path, change: tuple[str, str], said: list[str]
) -> None:
    file = _own(tmp_path, f"{FIRST},1.0".replace(*change, 1))
    error = _validate("--tables", str(file), "--cluster", "selene").exception
    assert isinstance(error, UserError) and all(words in str(error) for words in said), str(error)


def test_a_column_that_would_be_passed_over_is_refused(tmp_path: Path) -> None:
    error = _validate("--tables", str(_own(tmp_path, f"{FIRST},1.0,8", more=",kv_head")), "--cluster", "selene")
    assert isinstance(error.exception, UserError) and "name it kv_heads" in str(error.exception)
    noted = _validate("--tables", str(_own(tmp_path, f"{FIRST},1.0,mine", more=",note")), "--cluster", "selene")
    assert noted.exit_code == 0


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_bytes("größe,1\n".encode("latin-1"))
    error = _validate("--tables", str(file), "--cluster", "selene").exception
    assert isinstance(error, UserError) and "UTF-8" in str(error)


def test_milliseconds_are_not_taken_for_an_efficiency(tmp_path: Path) -> None:
    shown = _validate("--tables", str(_own(tmp_path, f"{FIRST},9000.0")), "--cluster", "selene").output
    assert "iter_time_s is in seconds" in " ".join(shown.split()) and "give --efficiency" not in shown


def test_a_step_that_does_not_fit_is_remarked(tmp_path: Path) -> None:
    file = _own(tmp_path, f"{FIRST.replace('32,4096', '80,8192', 1)},9.0")
    shown = " ".join(_validate("--tables", str(file), "--cluster", "selene").output.split())
    assert "more memory than a device has: a." in shown
