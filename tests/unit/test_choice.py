"""Choices: JSON there and back, keys that forget nothing, files that appear whole, and the policy."""

import json
import pickle
import threading
from dataclasses import fields, replace

import pytest
from finder_fakes import PROBLEM, choice, key

from flcuda import device as devices
from flcuda.device import CPU
from flcuda.finder import current_policy, policy
from flcuda.finder.candidate import Candidate
from flcuda.finder.choice import SCHEMA, Choice, Key, SchemaError, is_file_name, is_unfinished_name, library_version
from flcuda.finder.policy import FIELDS, Policy
from flcuda.finder.problem import ConvolutionProblem, Problem
from flcuda.finder.store import ChoiceStore

POLICY = Policy(deterministic=True, workspace_limit=1 << 20)


class TestJson:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"parameters": ()},
            {"median_ms": None, "spread_ms": None},
            {"deterministic": False, "workspace": 1 << 40},
            {"recorded": {}},
        ],
    )
    @pytest.mark.parametrize("chosen_under", [Policy(), POLICY, Policy(mode="heuristic")])
    def test_round_trip(self, changes, chosen_under):
        one = choice(key(policy=chosen_under), **changes)
        again = Choice.from_json(one.to_json())
        assert again == one
        assert again.recorded == one.recorded
        assert again.key.text == one.key.text
        assert again.key.file_name == one.key.file_name
        assert again.to_json() == one.to_json()

    def test_of_a_graph(self):
        problem = Problem.parse(
            "graph; x float16 2x8x4x4 nhwc; y = silu(%x); z = reduction(add, %y, (1, 8, 1, 1)); out z float32; out y"
        )
        one = choice(key(problem))
        again = Choice.from_json(one.to_json())
        assert again == one
        assert again.problem == problem
        assert again.key.text == one.key.text
        assert again.key.file_name == one.key.file_name
        assert one.key.file_name.startswith("graph-")
        assert one.key != key()

    def test_what_was_stored_before_is_still_found(self, tmp_path):
        """A whole file of this schema, as a release of flcuda has written it: when this fails, SCHEMA must change."""
        name = "forward-c512628442491dffcf7bb055.json"
        value = {
            "schema": 2,
            "key": {
                "problem": "forward n2 c3 6x5 k4 3x3 p1 s1 float32 nchw",
                "policy": {
                    "mode": "find",
                    "deterministic": False,
                    "workspace_limit": None,
                    "max_error": None,
                    "time": "device",
                    "effort": "fast",
                    "l2": "cold",
                },
                "device_model": {"cores": 2, "name": "a processor"},
                "library_version": "numpy 2.0.0",
                "sources": ["reference"],
            },
            "choice": {
                "source": "reference",
                "algo": "im2col",
                "math": "fma",
                "workspace": 4096,
                "deterministic": True,
                "parameters": {},
                "median_ms": 0.5,
                "spread_ms": 0.1,
            },
            "recorded": {"date": "2026-01-01T00:00:00+00:00"},
        }
        assert key().file_name == name
        (tmp_path / name).write_text(json.dumps(value))
        assert ChoiceStore(tmp_path).get(key()).algo == "im2col"

    def test_can_be_read_by_a_person(self):
        value = json.loads(choice().to_json())
        assert value["schema"] == SCHEMA
        assert value["key"]["problem"] == str(PROBLEM)
        assert value["choice"]["algo"] == "im2col"
        assert choice().to_json().endswith("}\n")

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("schema",), SCHEMA + 1),
            (("schema",), None),
            (("schema",), str(SCHEMA)),
            (("schema",), True),
            (("key",), {}),
            (("key",), []),
            (("key", "problem"), "forward n2"),
            (("key", "problem"), 3),
            (("key", "policy"), {"mode": "fastest"}),
            (("key", "policy"), {"colour": "red"}),
            (("key", "device_model"), "H200"),
            (("key", "sources"), [1]),
            (("choice",), "im2col"),
            (("choice", "source"), 3),
            (("choice", "algo"), None),
            (("choice", "workspace"), -1),
            (("choice", "workspace"), 1.5),
            (("choice", "workspace"), True),
            (("choice", "deterministic"), 1),
            (("choice", "parameters"), {"chunk_mib": [4]}),
            (("choice", "parameters"), [4]),
            (("choice", "median_ms"), "fast"),
            pytest.param(("choice", "median_ms"), 10**400, id="a number too large for a float"),
            (("key", "device_model"), {"name": []}),
            (("recorded",), None),
        ],
    )
    def test_anything_else_is_a_value_error(self, path, value):
        whole = json.loads(choice().to_json())
        part = whole
        for step in path[:-1]:
            part = part[step]
        part[path[-1]] = value
        with pytest.raises(ValueError, match=r"\w"):
            Choice.from_json(json.dumps(whole))

    @pytest.mark.parametrize(("schema", "age"), [(0, "older"), (SCHEMA - 1, "older"), (SCHEMA + 1, "newer")])
    def test_another_schema_is_told_apart_from_what_is_no_choice(self, schema, age):
        whole = {**json.loads(choice().to_json()), "schema": schema}
        with pytest.raises(SchemaError, match=f"of an? {age} flcuda .schema {schema}, not {SCHEMA}") as caught:
            Choice.from_json(json.dumps(whole))
        again = pickle.loads(pickle.dumps(caught.value))
        for error in (caught.value, again):
            assert (error.schema, error.problem) == (schema, str(PROBLEM))
        assert str(again) == str(caught.value)
        for part in ("key", "choice"):
            with pytest.raises(ValueError, match="not a Choice") as caught:
                Choice.from_json(json.dumps({**whole, part: None}))
            assert not isinstance(caught.value, SchemaError)

    def test_a_line_of_endless_parentheses_is_a_value_error(self):
        whole = json.loads(choice().to_json())
        whole["key"]["problem"] = f"graph float32; x float16 2x2; y = silu({'(' * 100_000}); out y"
        with pytest.raises(ValueError, match="nested too deeply"):
            Choice.from_json(json.dumps(whole))

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"schema": 1}', b"\xff\xfe\x00"])
    def test_not_even_an_object(self, text):
        with pytest.raises(ValueError, match=r"\w"):
            Choice.from_json(text)


class TestKey:
    @pytest.mark.parametrize(
        "changes",
        [
            {"problem": ConvolutionProblem.parse(str(PROBLEM) + " acc")},
            {"problem": ConvolutionProblem.parse(str(PROBLEM).replace("float32", "tf32"))},
            {"problem": ConvolutionProblem.parse(str(PROBLEM) + " d2")},
            {"policy": Policy(deterministic=True)},
            {"policy": Policy(workspace_limit=0)},
            {"policy": Policy(mode="heuristic")},
            {"policy": Policy(max_error=1e-3)},
            {"policy": Policy(time="host")},
            {"policy": Policy(effort="wide")},
            {"policy": Policy(l2="warm")},
            {"device_model": (("cores", 4), ("name", "a processor"))},
            {"library_version": "numpy 2.0.1"},
            {"sources": ("mine", "reference")},
        ],
    )
    def test_each_part_tells_keys_apart(self, changes):
        assert {next(iter(changes))} <= {field.name for field in fields(Key)}
        other = replace(key(), **changes)
        assert other != key()
        assert other.text != key().text
        assert other.file_name != key().file_name

    def test_pinned_uses_what_find_stored(self):
        pinned = Key.of(PROBLEM, Policy(mode="pinned"), CPU, ("reference",))
        assert pinned == Key.of(PROBLEM, Policy(), CPU, ("reference",))

    def test_of_a_device_that_is_here(self):
        of = Key.of(PROBLEM, Policy(), CPU, ("b", "a"))
        assert of.sources == ("a", "b")
        assert of.library_version == library_version(CPU)
        assert library_version(CPU).startswith("numpy ")
        assert Key.from_json(json.loads(of.text)) == of

    def test_the_device_is_asked_once(self, monkeypatch):
        """Each call of a layer that has not kept its plan makes a key."""
        policy = Policy(workspace_limit=987654321)
        asked = []
        model = devices.device_model
        monkeypatch.setattr(devices, "device_model", lambda device: asked.append(device) or model(device))
        keys = [Key.of(PROBLEM, policy, CPU, ("reference",)) for _ in range(3)]
        assert asked == [CPU]
        assert keys[0] == keys[2]
        other = Key.of(PROBLEM, Policy(workspace_limit=987654322), CPU, ("reference",))
        assert (other.policy.workspace_limit, len(asked)) == (987654322, 2)

    def test_pickled(self):
        again = pickle.loads(pickle.dumps(key()))
        assert again == key()
        assert hash(again) == hash(key())

    def test_file_names(self):
        assert is_file_name(key().file_name)
        assert not is_unfinished_name(key().file_name)
        for name in ("choice.json", f"{key().file_name}.bak", f" {key().file_name}", "forward-0.json", "README"):
            assert not is_file_name(name)
            assert not is_unfinished_name(name)

    def test_what_was_recorded_is_no_part_of_it(self):
        assert choice(recorded={"date": "later"}) == choice()


class TestChoice:
    def test_of_a_candidate(self):
        candidate = Candidate("reference", "fft", "fma", 64, True, build=lambda: None, parameters=(("a", 1),))
        made = Choice.of(key(), candidate, 1.5, 0.25)
        assert made.identity == candidate.identity
        assert made.id == candidate.id == "reference:fft"
        assert (made.median_ms, made.spread_ms) == (1.5, 0.25)
        assert made.recorded["date"]
        assert made.problem == PROBLEM
        assert made.policy == Policy()
        assert made.device_model == {"cores": 2, "name": "a processor"}
        assert hash(made) == hash(Choice.from_json(made.to_json()))

    def test_pin_writes_one_file_and_nothing_else(self, tmp_path):
        path = choice().pin(tmp_path / "a" / "b")
        assert path.read_text() == choice().to_json()
        assert list(path.parent.iterdir()) == [path]
        assert path.name.startswith("forward-")
        choice(algo="fft").pin(path.parent)
        assert list(path.parent.iterdir()) == [path]
        assert Choice.from_json(path.read_text()).algo == "fft"

    def test_pin_leaves_nothing_behind_when_it_fails(self, tmp_path, monkeypatch):
        old = choice().pin(tmp_path)
        before = old.read_text()

        def full(self, target):
            assert target == old
            assert is_unfinished_name(self.name)
            self.write_text(self.read_text()[:20])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("pathlib.Path.replace", full)
        with pytest.raises(OSError, match="No space"):
            choice(algo="fft").pin(tmp_path)
        assert list(tmp_path.iterdir()) == [old]
        assert old.read_text() == before


class TestPolicy:
    def test_context(self):
        assert current_policy() == Policy()
        with policy(deterministic=True) as outer:
            assert outer == current_policy() == Policy(deterministic=True)
            with policy(workspace_limit=5, mode="heuristic"):
                assert current_policy() == Policy("heuristic", True, 5)
            assert current_policy() == outer
        assert current_policy() == Policy()

    def test_is_restored_after_an_error(self):
        with pytest.raises(KeyError), policy(deterministic=True):
            raise KeyError
        assert current_policy() == Policy()

    def test_json_there_and_back(self):
        full = Policy("heuristic", True, 7, 1e-3, "both", "wide", "warm")
        for one in (Policy(), full):
            assert Policy(**json.loads(json.dumps(one.to_json()))) == one
            again = pickle.loads(pickle.dumps(one))
            assert again == one
            assert hash(again) == hash(one)
        assert all(getattr(full, name) != getattr(Policy(), name) for name in FIELDS)

    def test_a_new_thread_has_the_default(self):
        seen = []
        with policy(deterministic=True):
            thread = threading.Thread(target=lambda: seen.append(current_policy()))
            thread.start()
            thread.join()
        assert seen == [Policy()]

    @pytest.mark.parametrize(
        ("changes", "error", "named"),
        [
            ({"mode": "fast"}, ValueError, "mode 'fast'"),
            ({"deterministic": 1}, TypeError, "deterministic"),
            ({"workspace_limit": -1}, ValueError, "workspace_limit -1"),
            ({"workspace_limit": "2GiB"}, TypeError, "workspace_limit"),
            ({"workspace_limit": 1.5}, TypeError, "workspace_limit"),
            ({"max_error": 0}, ValueError, "max_error 0"),
            ({"max_error": float("nan")}, ValueError, "max_error nan"),
            ({"max_error": float("inf")}, ValueError, "max_error inf"),
            ({"max_error": True}, TypeError, "max_error"),
            ({"max_error": "1e-3"}, TypeError, "max_error"),
            ({"time": "wall"}, ValueError, "time 'wall'"),
            ({"effort": "max"}, ValueError, "effort 'max'"),
            ({"l2": "hot"}, ValueError, "l2 'hot'"),
            ({"speed": 3}, TypeError, "speed"),
        ],
    )
    def test_bad_values(self, changes, error, named):
        with pytest.raises(error, match=named), policy(**changes):
            pass
