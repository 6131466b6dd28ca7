"""The policy: what it accepts, that it is ambient, and that nothing of it is lost."""

import pickle
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

import flcuda
from flcuda.finder.policy import FIELDS, Policy, current_policy

OTHER = {
    "mode": "heuristic",
    "deterministic": True,
    "workspace_limit": 7,
    "max_error": 1e-3,
    "time": "host",
    "effort": "wide",
    "l2": "warm",
}


def test_every_field_is_another_policy():
    assert set(OTHER) == set(FIELDS)
    for name, value in OTHER.items():
        other = replace(Policy(), **{name: value})
        assert other != Policy()
        assert hash(other) != hash(Policy())
        assert Policy(**other.to_json()) == other
        assert hash(Policy(**other.to_json())) == hash(other)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"mode": "fastest"}, ValueError, "mode 'fastest' must be one of find, heuristic, pinned"),
        ({"time": "wall"}, ValueError, "time 'wall' must be one of device, host, both"),
        ({"effort": 3}, ValueError, "effort 3 must be one of fast, wide"),
        ({"l2": "hot"}, ValueError, "l2 'hot' must be one of cold, warm"),
        ({"deterministic": 1}, TypeError, "deterministic must be True or False, not 1"),
        ({"workspace_limit": -1}, ValueError, "workspace_limit -1 must not be negative"),
        ({"workspace_limit": 1.5}, TypeError, "workspace_limit must be bytes or None, not 1.5"),
        ({"max_error": 0}, ValueError, "max_error 0 must be a finite number above 0"),
        ({"max_error": float("nan")}, ValueError, "max_error nan"),
        ({"max_error": float("inf")}, ValueError, "max_error inf"),
        ({"max_error": "1e-3"}, TypeError, "max_error must be a number or None, not '1e-3'"),
        ({"max_error": True}, TypeError, "max_error must be a number or None, not True"),
    ],
)
def test_bad_values(change, kind, words):
    with pytest.raises(kind, match=words), flcuda.policy(**change):
        pass
    assert current_policy() == Policy()


def test_an_unknown_field_lists_the_known():
    with pytest.raises(TypeError, match=r"no field speed; it has mode, .*, l2"), flcuda.policy(speed=1):
        pass


def test_it_nests_and_ends():
    with flcuda.policy(deterministic=True, time="both"):
        with flcuda.policy(effort="wide") as inner:
            assert inner == current_policy() == Policy(deterministic=True, time="both", effort="wide")
        assert current_policy() == Policy(deterministic=True, time="both")
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_policy()))
        thread.start()
        thread.join()
        assert seen == [Policy()]
    assert current_policy() == Policy()


def test_a_pickle_is_equal_in_another_process():
    policy = Policy(workspace_limit=5, l2="warm")
    code = (
        "import pickle, sys; p = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "from flcuda.finder.policy import Policy; q = Policy(workspace_limit=5, l2='warm'); "
        "assert p == q and hash(p) == hash(q) and {q: 1}[p] == 1"
    )
    subprocess.run([sys.executable, "-c", code, pickle.dumps(policy).hex()], check=True)
