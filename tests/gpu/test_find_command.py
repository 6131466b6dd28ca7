"""Many problems on a GPU: `flcuda find --model` and `--problems`, policies compared, searches repeated."""

import json
import math
from pathlib import Path

import pytest

import flcuda
from flcuda import cli
from flcuda.finder import default_store
from flcuda.finder.compare import compare, repeat
from flcuda.finder.problem import Problem
from flcuda.finder.problems import parse_problems

# 7 spatial dimensions: more than cuDNN's tensors have
REFUSED = "forward n1 c2 3x3x3x3x3x3x3 k2 2x2x2x2x2x2x2 float32 nchw"
SMALL = "all n8 c32 14x14 k32 3x3 p1 float16 nhwc"


def stored() -> list[Path]:
    folder = default_store().folder
    return list(folder.glob("*.json")) if folder.exists() else []


def test_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["find", "--model", "resnet18", "--batch", "8", "--precision", "float16", "--device", "cuda", "--json"]
    assert cli.main(words) == 0
    value = json.loads(capsys.readouterr().out)
    problems = flcuda.problems("resnet18", 8, dtype="float16", layout="nhwc")
    assert [row["problem"] for row in value["problems"]] == [str(problem) for problem in problems]
    assert value["failures"] == []
    assert value["device"].startswith("cuda")
    for row in value["problems"]:
        assert 0 < row["ms"] < 100
        # no GPU computes faster than 3 PFLOP/s in float16; this says that the work was done within the time
        assert 0 < row["tflops"] < 3000
        assert row["report"]["best"] == row["best"]
    total = sum(row["count"] * row["ms"] for row in value["problems"])
    assert value["totals"]["total_ms"] == pytest.approx(total)
    assert value["totals"]["count"] == 59
    # what was found is what a plan takes
    assert len(stored()) == len(problems)
    for problem, row in list(zip(problems, value["problems"], strict=True))[:3]:
        assert flcuda.plan(problem, device="cuda").choice.id == row["id"]
    assert len(stored()) == len(problems)


def test_a_file_of_which_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problems.txt"
    path.write_text(f"# the second is refused\n{SMALL}\n{REFUSED}\nforward n8 c8 99 k8 3 p1\n", encoding="utf-8")
    assert cli.main(["find", "--problems", str(path), "--device", "cuda"]) == 1
    out = capsys.readouterr().out
    ending = out[out.index("failed:") :]
    assert str(Problem.parse(REFUSED)) in " ".join(ending.split())
    lines = [line for line in out.split("\n") if " n8 " in line]
    assert len(lines) == 4
    assert all(float(line.split()[0]) > 0 for line in lines)
    assert "4 distinct" in " ".join(out.split())


def test_policies_compared() -> None:
    problems = [*parse_problems(SMALL), *parse_problems("all n16 c24 27x27 k40 5x5 p2 float32 nchw")]
    policies = {
        "fastest": flcuda.Policy(),
        "deterministic": flcuda.Policy(deterministic=True),
        "no workspace": flcuda.Policy(workspace_limit=0),
        "heuristic": flcuda.Policy(mode="heuristic"),
        "warm": flcuda.Policy(l2="warm"),
    }
    found = compare([*problems, problems[0]], policies, device="cuda")
    assert not found.failures, found.failures
    assert found.counts[problems[0]] == 2
    for problem, costs in found.costs.items():
        fastest = costs["fastest"].ms
        assert fastest is not None
        for name in ("deterministic", "no workspace", "heuristic"):
            ms = costs[name].ms
            # from the same measurement, so that nothing is faster than the fastest but by a tie
            assert ms is None or fastest <= 1.011 * ms, (str(problem), name)
        assert costs["heuristic"].ms is not None, costs["heuristic"].reason
        assert costs["deterministic"].deterministic in (True, None)
        assert costs["no workspace"].workspace in (0, None)
    assert found.ratio("heuristic") >= 0.98
    assert max(map(len, str(found).split("\n"))) <= 80
    assert stored() == []


def test_a_search_repeated() -> None:
    problems = parse_problems(SMALL)
    found = repeat(problems, 4, device="cuda")
    assert not found.failures, found.failures
    assert all(len(each.picks) == 4 for each in found.problems.values())
    assert 0 <= found.mean_regret <= found.largest_regret
    assert len(found.total_regrets) == 4
    assert all(regret >= 0 and math.isfinite(regret) for regret in found.total_regrets)
    assert stored() == []


def test_repeat_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["find", SMALL, "--device", "cuda", "--repeat", "2", "--l2", "warm", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["policy"]["l2"] == "warm"
    assert len(value["problems"]) == 3
    assert value["chances"] == 3
