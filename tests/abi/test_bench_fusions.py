"""The benchmark of the fusions through the real library: its graphs, planned for an H200 that need not be here."""

import json

import pytest
from bench_scripts import loading
from planning import CUDNN, require_device_properties

from flcuda.cudnn.device_properties import DeviceProperties

pytestmark = CUDNN


@pytest.fixture(scope="module")
def bench():
    require_device_properties()
    with loading() as load:
        yield load("bench_fusions")


@pytest.fixture(scope="module")
def h200(bench):
    with DeviceProperties.from_profile("h200") as properties:
        yield properties


def first_site(bench, pattern):
    return next(place for place in bench.sites(128, 224) if place.counts.get(pattern.kind) and place.channels > 8)


@pytest.mark.parametrize("index", [0, 1, 3, 4, 5, 6, 7, 8, 9])
def test_float16_engines_are_offered(bench, h200, index):
    pattern = bench.PATTERNS[index]
    offer = bench.offered(pattern, first_site(bench, pattern), "float16", properties=h200)
    assert offer.intermediate == "float32"
    assert offer.configurations
    assert offer.refusal == ()
    # each pointer of a plan is an operand that is known by its role
    roles = {tensor.uid for tensor in offer.draft.roles.values()}
    assert set(offer.graph.pointers) <= roles
    text = bench.engines_text(offer.configurations)
    assert sum(int(part.rpartition("x")[2]) for part in text.split(", ")) == len(offer.configurations)


def test_a_refusal_says_why(bench, h200):
    pattern = bench.PATTERNS[11]
    offer = bench.offered(pattern, first_site(bench, pattern), "float16", properties=h200)
    assert offer.configurations == []
    assert offer.refusal
    assert all("operation 1" not in why for why in offer.refusal)


def test_the_weight_sums_are_for_float16_only(bench, h200):
    pattern = bench.PATTERNS[6]
    offer = bench.offered(pattern, first_site(bench, pattern), "bfloat16", properties=h200)
    assert offer.configurations == []
    assert any("float16 only" in why for why in offer.refusal)


def test_factors_out_of_sums(bench, h200):
    draft = bench.finalize_graph(64, 128 * 56 * 56, "float16")
    plan = draft.graph.build(None, h200).configurations()[0].plan()
    assert set(plan.uids) == {tensor.uid for tensor in draft.roles.values()}


def test_plan_only(bench, capsys):
    words = ["--plan-only", "--only", "end's relu", "--batch", "16", "--every"]
    bench.main([*words, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["rows"]) == 7
    assert answer["rows"][0]["plans"] >= 1
    assert answer["rows"][0]["saved_us"] == pytest.approx(16 * 64 * 56 * 56 * 2 * 17 / 16 / 4159e3)
    assert answer["a_step_saved_us"] == bench.totals(answer["rows"], "saved_us")
    bench.main(words)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "float16 nhwc, batch 16, planned for h200"
    assert max(map(len, printed)) <= 110
