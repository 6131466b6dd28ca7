"""The generator: its words, its refusals, and that the committed file is what it gives."""

import re
from pathlib import Path

import pytest

from flcuda.cudnn import generate


def parsed(cudnn: Path | None = None) -> generate.Headers:
    pytest.importorskip("clang.cindex", reason="libclang is not installed (pip install libclang)")
    try:
        folders = generate.header_folders()
    except generate.GenerateError as error:
        pytest.skip(str(error))
    if cudnn is None and "#define CUDNN_MINOR 28\n" not in (folders[0] / "cudnn_version.h").read_text():
        pytest.skip("the headers here are not the pinned ones")
    return generate.parse(cudnn)


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        ("cudnnCreateTensorDescriptor", "Creates a tensor descriptor"),
        ("cudnnCreateRNNDescriptor", "Creates an RNN descriptor"),
        ("cudnnSetTensor4dDescriptorEx", "Sets the 4-D tensor descriptor (extended form)"),
        ("cudnnConvolutionBackwardData", "Computes the convolution (backward data)"),
        (
            "cudnnFindConvolutionForwardAlgorithmEx",
            "Measures and ranks the convolution forward algorithm (extended form)",
        ),
        ("cudnnDropoutGetStatesSize", "Gets the dropout states size"),
        ("cudnnRNNForward", "Computes the RNN (forward)"),
        ("cudnnSetCTCLossDescriptor_v9", "Sets the CTC loss descriptor (version 9)"),
        ("cudnnGraphVersionCheck", "Checks that the graph library and the core have the same version"),
    ],
)
def test_purposes(name: str, purpose: str) -> None:
    assert generate._purpose(name) == purpose


def test_the_committed_bindings_are_what_the_pinned_headers_give(capsys: pytest.CaptureFixture[str]) -> None:
    parsed()
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_the_counts_of_the_pinned_headers() -> None:
    headers = parsed()
    kinds = [type(kind) for kind in headers.types]
    assert headers.version == "9.28.0"
    assert len(headers.functions) == 239
    assert sum(function.deprecated for function in headers.functions) == 135
    assert kinds.count(generate.Enum) == 73 + 1  # and CUDA's libraryPropertyType
    assert kinds.count(generate.Struct) == 7
    assert kinds.count(generate.Opaque) == 21 + 1  # and that of a void pointer


def test_nothing_of_the_machine_is_in_the_text() -> None:
    headers = parsed()
    text = generate.render(headers)
    assert text == generate.render(headers)
    for folder in generate.header_folders():
        assert str(folder) not in text
    assert not re.search(r"/(work|home|usr|root|tmp)/|20\d\d-\d\d", text)
    compile(text, "bindings.py", "exec")


def test_check_shows_a_short_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    headers = parsed()
    output = tmp_path / "bindings.py"
    assert generate.main(["--check", "--output", str(output)]) == 1
    assert generate.main(["--output", str(output)]) == 0
    assert generate.main(["--check", "--output", str(output)]) == 0
    text = generate.render(headers)
    output.write_text(text.replace("CUDNN_DIM_MAX = 8", "CUDNN_DIM_MAX = 9"))
    capsys.readouterr()
    assert generate.main(["--check", "--output", str(output)]) == 1
    shown = capsys.readouterr().err
    assert "-CUDNN_DIM_MAX = 9" in shown
    assert "+CUDNN_DIM_MAX = 8" in shown
    assert len(shown.splitlines()) < 50
    assert output.read_text() != text


def test_missing_headers_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("clang.cindex", reason="libclang is not installed (pip install libclang)")
    monkeypatch.setattr(generate.importlib.util, "find_spec", lambda _: None)
    output = tmp_path / "bindings.py"
    assert generate.main(["--output", str(output)]) == 2
    message = capsys.readouterr().err
    assert "cudnn.h" in message
    assert "pip install libclang nvidia-cudnn-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12" in message
    assert generate.main(["--headers", str(tmp_path), "--output", str(output)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert not output.exists()


def test_an_error_of_the_compiler_stops_it(tmp_path: Path) -> None:
    """One unknown type would otherwise become int."""
    parsed()
    broken = copy_of_the_headers(tmp_path)
    header = broken / "cudnn_graph.h"
    header.write_text(header.read_text(encoding="latin-1").replace("#include <stdint.h>", ""), encoding="latin-1")
    version = broken / "cudnn_version.h"
    version.write_text(version.read_text() + "\nno_such_type_t cudnnNothing(void);\n")
    with pytest.raises(generate.GenerateError, match="no_such_type_t"):
        generate.parse(broken)


def test_the_compiler_s_own_headers_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them size_t would be int, and structs would lose their fields."""
    parsed()
    monkeypatch.setattr(generate, "_compiler_folder", lambda: tmp_path)
    with pytest.raises(generate.GenerateError, match="file not found"):
        generate.parse()


@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        ("cudnnStatus_t CUDNNWINAPI cudnnTakesLongDouble(long double x);", "cudnnTakesLongDouble: x"),
        ("float CUDNNWINAPI cudnnGivesFloat(void);", "cudnnGivesFloat"),
        ("cudnnStatus_t CUDNNWINAPI cudnnHasNoName(int);", "cudnnHasNoName"),
        ("cudnnStatus_t CUDNNWINAPI cudnnScalesNothing(const void *alpha, void *x);", "cudnnScalesNothing"),
        ("typedef long double cudnnLong_t;", "cudnnLong_t"),
    ],
)
def test_what_cannot_be_expressed_stops_it(tmp_path: Path, declaration: str, named: str) -> None:
    parsed()
    changed = copy_of_the_headers(tmp_path)
    header = changed / "cudnn_gnn_ops.h"
    text = header.read_bytes().decode("latin-1")
    place = text.index("/* Aggregation operation")
    header.write_bytes((text[:place] + declaration + text[place:]).encode("latin-1"))
    with pytest.raises(generate.GenerateError, match=named):
        generate.parse(changed)


def test_a_newer_function_is_taken_in(tmp_path: Path) -> None:
    parsed()
    changed = copy_of_the_headers(tmp_path)
    header = changed / "cudnn_gnn_ops.h"
    text = header.read_bytes().decode("latin-1")
    place = text.index("/* Aggregation operation")
    declaration = """
/** @brief Something.
 * @param[in] count  A number.
 * @param[in,out] y  Memory.
 * @since cuDNN 9.99.0 */
CUDNN_DEPRECATED cudnnStatus_t CUDNNWINAPI cudnnTryThings(cudnnHandle_t handle, const int64_t counts[], void *y);
"""
    header.write_bytes((text[:place] + declaration + text[place:]).encode("latin-1"))
    found = {function.name: function for function in generate.parse(changed).functions}
    assert len(found) == 240
    function = found["cudnnTryThings"]
    assert (function.since, function.deprecated, function.header) == ("9.99.0", True, "cudnn_gnn_ops.h")
    assert [(item.name, item.argtype, item.direction) for item in function.parameters] == [
        ("handle", "cudnnHandle_t", "in"),
        ("counts", "TypedPointer(c_int64, const=True)", "in"),
        ("y", "_device", "in,out"),
    ]


def copy_of_the_headers(folder: Path) -> Path:
    for header in generate.header_folders()[0].glob("*.h"):
        (folder / header.name).write_bytes(header.read_bytes())
    return folder
