"""`flcuda choices`: show, pin, check and clear, on a machine with no GPU."""

import json
import os
import re
from pathlib import Path

import pytest
from finder_fakes import PROBLEM, Fake, FakeSource, choice, key, only

from flcuda import cli
from flcuda.cli import choices as command
from flcuda.device import CPU
from flcuda.finder import default_store, find
from flcuda.finder.choice import SCHEMA, Choice, Key
from flcuda.finder.policy import Policy
from flcuda.finder.problem import ConvolutionProblem
from flcuda.finder.store import ChoiceStore
from flcuda.finder.verify import Verification

BACKWARD = ConvolutionProblem.parse("backward_data n2 c3 6x5 k4 3x3 p1 float32 nchw")
HALF = ConvolutionProblem.parse("forward n2 c8 6x5 k4 3x3 p1 float16 nhwc")


def call(*words: object) -> int:
    return cli.main(["choices", *map(str, words)])


def here(problem: ConvolutionProblem = PROBLEM, policy: Policy | None = None, sources=("fake",)) -> Key:
    return Key.of(problem, Policy() if policy is None else policy, CPU, sources)


def put(*stored: Choice) -> Path:
    for each in stored:
        default_store().put(each)
    return default_store().folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestShow:
    def test_table(self, capsys):
        put(choice(), choice(here(HALF), source="legacy", algo="GEMM", median_ms=None))
        assert call("show") == 0
        out = capsys.readouterr().out
        (first,) = (line for line in out.splitlines() if "float16" in line)
        assert first.startswith(f"{HALF} ")
        assert re.search(r" legacy:GEMM +- ", first)
        (second,) = (line for line in out.splitlines() if "float32" in line)
        assert re.search(r" reference:im2col +0\.3000 +a processor +numpy 2\.0\.0 +2026-01-01$", second)
        assert out.endswith(f"2 choices in {default_store().folder}\n")

    def test_what_is_the_same_for_all_is_said_once(self, capsys):
        put(choice(key(policy=Policy(deterministic=True, time="host"))))
        call("show")
        out = capsys.readouterr().out
        assert out.startswith("deterministic time=host, a processor, numpy 2.0.0\n")
        assert out.count("numpy 2.0.0") == 1

    def test_policies_are_told_apart(self, capsys):
        put(choice(), choice(key(policy=Policy(max_error=0.001))))
        call("show")
        assert "max_error=0.001 " in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("pattern", "count"),
        [
            ((), 3),
            (("forward*",), 2),
            (("forward", "*"), 2),
            (("*float16*",), 1),
            (("*c[38]*",), 3),
            (("c8",), 0),
            (("*FLOAT16*",), 0),
            ((str(HALF),), 1),
            (("forward n2 c8 6x5 k4 3x3 float16 p1 nhwc",), 1),
            (("forward n2 c8",), 0),
        ],
    )
    def test_pattern(self, capsys, pattern, count):
        put(choice(), choice(key(HALF)), choice(key(BACKWARD)))
        assert call("show", *pattern, "--json") == 0
        assert len(json.loads(capsys.readouterr().out)) == count
        assert call("show", *pattern) == 0
        out = capsys.readouterr().out
        assert f"{count} choice" in out if count else out.startswith("no choice that matches")

    def test_json(self, capsys):
        folder = put(choice())
        assert call("show", "--json") == 0
        (one,) = json.loads(capsys.readouterr().out)
        assert one["file"] == str(folder / key().file_name)
        assert one["problem"] == str(PROBLEM)
        assert one["policy"] == Policy().to_json()
        assert one["parameters"] == {"chunk_mib": 4, "order": "rows"}
        assert one["recorded"]["cuda_driver"] == 13000

    def test_what_cannot_be_used_is_told(self, capsys, recwarn):
        folder = put(choice(), choice(key(HALF)))
        older = folder / key(HALF).file_name
        older.write_text(older.read_text().replace(f'"schema": {SCHEMA}', '"schema": 1'))
        (folder / "README").write_text("mine")
        assert call("show") == 0
        out = capsys.readouterr().out
        assert f"not usable: {older.name}: it is of an older flcuda (schema 1, not {SCHEMA})\n" in out
        assert "README" not in out
        assert call("show", "--json") == 0
        usable, fault = json.loads(capsys.readouterr().out)
        assert "fault" not in usable
        assert fault == {
            "file": str(older),
            "problem": str(HALF),
            "fault": f"it is of an older flcuda (schema 1, not {SCHEMA})",
        }
        assert list(recwarn) == []

    def test_nothing_stored_yet(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("FLCUDA_CHOICES", str(tmp_path / "none"))
        assert call("show") == 0
        assert capsys.readouterr().out == f"no choice is stored in {tmp_path / 'none'}\n"
        assert call("show", "--json") == 0
        assert capsys.readouterr().out == "[]\n"

    @pytest.mark.parametrize(
        "words", [("show", "--folder"), ("clear", "--folder"), ("check",), ("pin", "x", "--folder")]
    )
    def test_a_folder_that_is_not_there_is_named(self, capsys, tmp_path, words):
        assert call(*words, tmp_path / "none") == 2
        assert str(tmp_path / "none") in capsys.readouterr().err

    def test_a_file_in_place_of_the_folder_is_named(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        assert call("show", "--folder", tmp_path / "file") == 2
        assert str(tmp_path / "file") in capsys.readouterr().err

    def test_what_rich_would_take_for_its_own(self, capsys):
        put(choice(algo="[bold]:smile:[/]"))
        call("show")
        assert "reference:[bold]:smile:[/]" in capsys.readouterr().out


class TestPin:
    def test_this_machines_choices(self, capsys, tmp_path):
        put(choice(here()), choice(here(HALF)), choice(key()), choice(here(BACKWARD), algo="fft"))
        assert call("pin", tmp_path / "pins", "*float32*") == 0
        assert capsys.readouterr().out.startswith(f"2 choices pinned in {tmp_path / 'pins'}\n")
        store = ChoiceStore(tmp_path / "pins")
        assert store.get(here(BACKWARD)).algo == "fft"
        assert names(store.folder) == sorted([here().file_name, here(BACKWARD).file_name])

    def test_json(self, capsys, tmp_path):
        put(choice(here()))
        assert call("pin", tmp_path, "--json") == 0
        assert json.loads(capsys.readouterr().out) == [str(tmp_path / here().file_name)]

    def test_of_another_folder(self, capsys, tmp_path):
        choice(here()).pin(tmp_path / "from")
        assert call("pin", tmp_path / "to", "--folder", tmp_path / "from") == 0
        assert names(tmp_path / "to") == [here().file_name]

    def test_what_is_pinned_is_what_was_stored(self, tmp_path):
        folder = put(choice(here()))
        call("pin", tmp_path / "pins")
        pinned = tmp_path / "pins" / here().file_name
        assert pinned.read_bytes() == (folder / here().file_name).read_bytes()

    def test_nothing_to_pin(self, capsys, tmp_path):
        folder = put(choice())
        assert call("pin", tmp_path / "pins") == 2
        err = capsys.readouterr().err
        assert f"no choice for this machine is stored in {folder}; 1 hold for other machines" in err
        assert call("pin", tmp_path / "pins", "graph*") == 2
        assert "that matches 'graph*'" in capsys.readouterr().err
        assert not (tmp_path / "pins").exists()

    def test_a_folder_that_cannot_be_written_is_named(self, capsys, tmp_path):
        put(choice(here()))
        (tmp_path / "file").write_text("")
        assert call("pin", tmp_path / "file") == 2
        err = capsys.readouterr().err
        assert str(tmp_path / "file" / here().file_name) in err
        assert ".tmp" not in err


class TestCheck:
    def source(self, monkeypatch: pytest.MonkeyPatch, *fakes: Fake) -> FakeSource:
        monkeypatch.setattr(command, "Verifier", NoVerifier)
        return only(monkeypatch, *fakes)

    def verdicts(self, capsys) -> list[dict]:
        return json.loads(capsys.readouterr().out)["choices"]

    def test_good(self, capsys, monkeypatch):
        self.source(monkeypatch, Fake("slow", delay=20), Fake("quick", delay=10))
        stored = find(PROBLEM, device="cpu").best
        assert stored.algo == "quick"
        assert call("check") == 0
        out = capsys.readouterr().out
        assert re.search(r"fake:quick +good ", out)
        assert out.endswith("1 good, 0 lost more than 5 %, 0 gone, 0 not checked\n")

    def test_stores_nothing(self, monkeypatch):
        self.source(monkeypatch, Fake("a", delay=100), Fake("b", delay=103))
        folder = put(choice(here(), source="fake", algo="b", parameters=()))
        before = {path: path.read_bytes() for path in folder.iterdir()}
        assert call("check") == 0
        assert {path: path.read_bytes() for path in folder.iterdir()} == before

    @pytest.mark.parametrize(("delay", "regret", "status"), [(104, 5, 0), (106, 5, 1), (106, 7, 0), (104, "3%", 1)])
    def test_regret(self, capsys, monkeypatch, delay, regret, status):
        self.source(monkeypatch, Fake("best", delay=100), Fake("mine", delay=delay))
        put(choice(here(), source="fake", algo="mine", parameters=()))
        assert call("check", "--regret", regret, "--json") == status
        (verdict,) = self.verdicts(capsys)
        assert verdict["verdict"] == ("lost" if status else "good")
        assert verdict["regret"] == pytest.approx(delay / 100 - 1, rel=1e-3)
        assert verdict["best"] == "fake:best"
        assert verdict["now_ms"] == pytest.approx(delay, rel=1e-3)
        assert verdict["best_ms"] == pytest.approx(100, rel=1e-3)
        assert verdict["stored_ms"] == choice().median_ms

    def test_what_was_disturbed_once_is_good(self, capsys, monkeypatch):
        """The first time the choice seems twice as slow as the best."""
        mine, best = Fake("mine", delay=10), Fake("best", delay=10)
        source = self.source(monkeypatch, mine, best)
        ask = source.candidates

        def candidates(problem, policy, device):
            mine.delay = 20 if not source.asked else 10
            yield from ask(problem, policy, device)

        monkeypatch.setattr(source, "candidates", candidates)
        put(choice(here(), source="fake", algo="mine", parameters=()))
        assert call("check") == 0
        assert len(source.asked) == 2

    def test_lost_names_the_best(self, capsys, monkeypatch):
        source = self.source(monkeypatch, Fake("best", delay=10), Fake("mine", delay=20))
        put(choice(here(), source="fake", algo="mine", parameters=()))
        assert call("check") == 1
        out = capsys.readouterr().out
        assert f"lost: {here().file_name}: the best is fake:best\n" in out
        assert "100.0 %" in out
        assert len(source.asked) == 2

    def test_the_policy_of_the_choice(self, monkeypatch, capsys):
        """A faster one that the policy forbids is no loss."""
        source = self.source(monkeypatch, Fake("best", delay=10, deterministic=False), Fake("mine", delay=20))
        policy = Policy(deterministic=True, workspace_limit=5000)
        put(choice(here(policy=policy), source="fake", algo="mine", parameters=()))
        assert call("check") == 0
        assert source.asked == [policy]

    def test_a_heuristic_choice_is_measured(self, monkeypatch, capsys):
        source = self.source(monkeypatch, Fake("mine", delay=10))
        put(choice(here(policy=Policy(mode="heuristic")), source="fake", algo="mine", parameters=(), median_ms=None))
        assert call("check", "--json") == 0
        (verdict,) = self.verdicts(capsys)
        assert verdict["stored_ms"] is None
        assert verdict["now_ms"] == pytest.approx(10, rel=1e-3)
        assert source.asked == [Policy()]

    def test_gone(self, monkeypatch, capsys):
        self.source(monkeypatch, Fake("best", delay=10), Fake("broken", reason="the library says no"))
        put(
            choice(here(), source="fake", algo="mine", parameters=()),
            choice(here(BACKWARD), source="fake", algo="broken", parameters=()),
        )
        assert call("check", "--json") == 1
        verdicts = self.verdicts(capsys)
        assert [verdict["verdict"] for verdict in verdicts] == ["gone", "gone"]
        assert "the library says no" in verdicts[0]["reason"]
        assert "no longer offered" in verdicts[1]["reason"]

    def test_gone_with_everything_else(self, monkeypatch, capsys):
        self.source(monkeypatch, Fake("mine", reason="the library says no"))
        put(choice(here(), source="fake", algo="mine", parameters=()))
        assert call("check", "--json") == 1
        (verdict,) = self.verdicts(capsys)
        assert verdict["verdict"] == "gone"
        assert "the library says no" in verdict["reason"]

    @pytest.mark.parametrize(("delay", "verdict"), [(10, "good"), (30, "lost")])
    def test_what_the_search_does_not_list_is_restored(self, monkeypatch, capsys, delay, verdict):
        """A wide search may come by other candidates than the one before."""
        source = self.source(monkeypatch, Fake("best", delay=10), Fake("mine", delay=delay))
        listed = source.fakes[:1]

        def candidates(problem, policy, device):
            for fake in listed:
                yield fake.candidate(source.name)

        monkeypatch.setattr(source, "candidates", candidates)
        put(choice(here(), source="fake", algo="mine", parameters=()))
        assert call("check", "--json") == (verdict == "lost")
        (found,) = self.verdicts(capsys)
        assert found["verdict"] == verdict
        assert found["now_ms"] == pytest.approx(delay, rel=1e-3)

    def test_other_machines_and_versions_are_not_checked(self, monkeypatch, capsys):
        source = self.source(monkeypatch, Fake("mine"))
        model = here().device_model
        put(
            choice(key()),
            choice(key(BACKWARD, device_model=model)),
            choice(key(HALF, device_model=(("name", "NVIDIA H200"), ("sm", 90)), library_version="cudnn 9.1.0")),
        )
        assert call("check") == 0
        out = capsys.readouterr().out
        assert f"it is of numpy 2.0.0, here is {here().library_version}\n" in out
        assert "it is of another machine: NVIDIA H200 (sm 90)\n" in out
        assert out.endswith("0 good, 0 lost more than 5 %, 0 gone, 3 not checked\n")
        assert source.asked == []

    def test_a_source_that_is_not_registered_here_is_not_checked(self, monkeypatch, capsys):
        self.source(monkeypatch, Fake("mine"))
        put(choice(here(sources=("fake", "mine")), source="mine", parameters=()))
        assert call("check", "--json") == 0
        (verdict,) = self.verdicts(capsys)
        assert verdict["verdict"] == "not checked"
        assert "'mine'" in verdict["reason"]

    def test_a_pin_that_cannot_be_read_fails(self, monkeypatch, capsys, tmp_path):
        self.source(monkeypatch, Fake("mine"))
        path = choice(here()).pin(tmp_path)
        path.write_text(path.read_text()[:100])
        older = choice(here(HALF)).pin(tmp_path)
        older.write_text(older.read_text().replace(f'"schema": {SCHEMA}', '"schema": 1'))
        assert call("check", tmp_path) == 1
        out = capsys.readouterr().out
        assert f"gone: {path.name}: " in out
        assert f"gone: {older.name}: it is of an older flcuda" in out

    def test_nothing_to_check_is_an_error(self, capsys, tmp_path):
        assert call("check", tmp_path) == 2
        assert str(tmp_path) in capsys.readouterr().err

    def test_without_memory(self, monkeypatch, capsys):
        self.source(monkeypatch, Fake("mine"))
        folder = put(choice(here(), source="fake", algo="mine", parameters=()))

        def fail(*_, **__):
            raise MemoryError("no room")

        monkeypatch.setattr(command.search, "find", fail)
        assert call("check") == 2
        err = capsys.readouterr().err
        assert str(folder / here().file_name) in err
        assert "no room" in err

    def test_bad_regret(self, capsys):
        for word in ("-1", "nan", "inf", "five"):
            with pytest.raises(SystemExit):
                call("check", f"--regret={word}")
            assert word in capsys.readouterr().err

    def test_for_real(self, capsys, tmp_path):
        """The reference source, with a limit that no disturbance reaches."""
        find(BACKWARD, device="cpu").best.pin(tmp_path)
        assert call("check", tmp_path, "--regret", 1e9) == 0
        assert "1 good" in capsys.readouterr().out


class NoVerifier:
    """Finds everything right."""

    def __init__(self, *_: object) -> None:
        pass

    def check(self, *_: object, **__: object):
        return Verification(error=0.0, bound=1.0, repeats=True, reason=None)


class TestClear:
    def test_says_what_it_would_do(self, capsys):
        folder = put(choice(), choice(key(HALF)))
        before = names(folder)
        assert call("clear") == 1
        told = capsys.readouterr()
        assert told.out.count("would remove forward-") == 2
        assert str(HALF) in told.out
        assert "--yes to remove 2 choices" in told.err
        assert str(folder) in told.err
        assert names(folder) == before

    def test_yes(self, capsys):
        folder = put(choice(), choice(key(HALF)), choice(key(BACKWARD)))
        assert call("clear", "forward*", "--yes") == 0
        assert capsys.readouterr().out.count("removed forward-") == 2
        assert names(folder) == [key(BACKWARD).file_name]

    def test_only_choices(self, capsys):
        folder = put(choice(), choice(key(HALF)))
        older = folder / key(HALF).file_name
        older.write_text(older.read_text().replace(f'"schema": {SCHEMA}', '"schema": 1'))
        foreign = [folder / "forward-000000000000000000000000.json", folder / "notes.json", folder / "README"]
        for path in foreign:
            path.write_text('{"mine": 1}')
        (folder / "graph-000000000000000000000000.json").mkdir()
        os.mkfifo(folder / "forward-000000000000000000000001.json")
        left = {path.name for path in foreign} | {
            "graph-000000000000000000000000.json",
            "forward-000000000000000000000001.json",
        }
        assert call("clear", "--yes") == 0
        assert set(names(folder)) == left
        out = capsys.readouterr().out
        assert f"removed {older.name}: {HALF}\n" in out
        assert "left forward-000000000000000000000000.json: not a Choice" in out
        assert "README" not in out

    def test_a_link_goes_and_what_it_leads_to_stays(self, tmp_path):
        target = choice().pin(tmp_path / "elsewhere")
        folder = tmp_path / "choices"
        folder.mkdir()
        (folder / target.name).symlink_to(target)
        assert call("clear", "--yes", "--folder", folder) == 0
        assert names(folder) == []
        assert target.exists()

    def test_nothing_to_clear(self, capsys):
        put()
        assert call("clear") == 0
        assert "no choice is stored in" in capsys.readouterr().out

    def test_json(self, capsys):
        folder = put(choice())
        assert call("clear", "--json") == 1
        assert json.loads(capsys.readouterr().out) == {"removed": False, "files": [str(folder / key().file_name)]}
        assert call("clear", "--json", "--yes") == 0
        assert json.loads(capsys.readouterr().out)["removed"] is True
        assert names(folder) == []

    def test_what_cannot_be_removed_is_named(self, capsys, monkeypatch):
        folder = put(choice())

        def fail(self, **_):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "unlink", fail)
        assert call("clear", "--yes") == 2
        assert str(folder / key().file_name) in capsys.readouterr().err


def test_an_action_is_needed(capsys):
    with pytest.raises(SystemExit) as stopped:
        call()
    assert stopped.value.code == 2
    assert "ACTION" in capsys.readouterr().err
