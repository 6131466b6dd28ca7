"""Host microseconds of one call of a plan, its parts, and the same convolution by NVIDIA's cudnn-frontend.

The problem is so small that the GPU keeps up, so what is timed is the host. Each form of call is timed in rounds of
many calls; the GPU is waited for between rounds only; the rounds of all forms are interleaved in a random order.
Printed are the median over the rounds and the quartiles. "In turn": other operands at each call, of 32 sets; a plan
keeps what cuDNN needs for as many. "New arrays": operands with addresses that were not in the 255 calls before.

The package nvidia-cudnn-frontend is measured when it is installed, in every form of its call that there is. The loop
around each of its calls costs about 0.1 us more than that around flcuda's.

Run: python bench/bench_plan_host.py [--rounds 100] [--calls 200] [--json]
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

# What is found here must not become anybody's stored choice.
os.environ["FLCUDA_CHOICES"] = tempfile.mkdtemp(prefix="flcuda-bench-")

import cupy
from host_rounds import Round, parser, show

import flcuda
from flcuda import device as devices
from flcuda.cudnn.graph import ExecutionPlan, Graph
from flcuda.cudnn.resources import handle

LINE = "forward n1 c8 8x8 k8 3x3 p1 float16 nhwc"
SETS = 256  # of operands; more than a plan keeps variant packs of
FEW = 32  # and fewer


def operands(problem: Any) -> list[tuple[Any, Any, Any]]:
    sets = []
    for seed in range(SETS):
        arrays = problem.random_arrays(seed, "cuda")
        sets.append((arrays["x"], arrays["w"], arrays["out"]))
    return sets


def execution_plan(problem: Any) -> ExecutionPlan:
    graph = Graph()
    tensors = [
        graph.tensor(problem.shape_of(name), "float16", strides=problem.strides_of(name), name=name)
        for name in ("x", "w")
    ]
    graph.output(graph.convolution_forward(*tensors, padding=1), strides=problem.strides_of("y"), name="y")
    return graph.build(handle()).configurations()[0].plan()


# --- flcuda -----------------------------------------------------------------------------------------------------------


def ours(problem: Any, sets: list[tuple[Any, Any, Any]], notes: list[str]) -> dict[str, Round]:
    row = flcuda.find(problem, sources=["graph"], policy=flcuda.Policy(mode="heuristic"), device="cuda").rows[0]
    plan = row.plan()
    made = execution_plan(problem)
    notes.append(f"flcuda: the finder's plan is {row.label}, the ExecutionPlan {made.tag}")
    notes.append(f"workspaces: {plan.workspace} and {made.workspace} bytes")
    scratch = cupy.empty(max(1, made.workspace), cupy.uint8)
    workspace = scratch.data.ptr if made.workspace else 0
    x, w, y = sets[0]
    pointers = [tuple(array.data.ptr for array in arrays) for arrays in sets]
    plan(x, w, out=y)

    def same(calls: int) -> None:
        for _ in range(calls):
            plan(x, w, out=y)

    def new(calls: int) -> None:
        for _, (a, b, c) in zip(range(calls), cycled_sets, strict=False):
            plan(a, b, out=c)

    def in_turn(calls: int) -> None:
        for _, (a, b, c) in zip(range(calls), cycled_few, strict=False):
            plan(a, b, out=c)

    def allocating(calls: int) -> None:
        for _ in range(calls):
            plan(x, w)

    def unchecked(calls: int) -> None:
        for _ in range(calls):
            plan.run(x, w, y)

    def arrays_only(calls: int) -> None:
        for _ in range(calls):
            made(x, w, y)

    def pointers_only(calls: int) -> None:
        on, first = handle(), pointers[0]
        for _ in range(calls):
            made.run(on, first, workspace)

    def new_pointers(calls: int) -> None:
        on = handle()
        for _, each in zip(range(calls), cycled_pointers, strict=False):
            made.run(on, each, workspace)

    def checked(calls: int) -> None:
        arrays = (x, w, y)
        for _ in range(calls):
            if plan._addresses(arrays) is None:
                raise AssertionError("the operands do not take the fast path")

    def checked_in_turn(calls: int) -> None:
        for _, arrays in zip(range(calls), cycled_few, strict=False):
            if plan._addresses(arrays) is None:
                raise AssertionError("the operands do not take the fast path")

    def launched(calls: int) -> None:
        launch, first = plan._launch, pointers[0]
        for _ in range(calls):
            launch(first)

    def shared_handle(calls: int) -> None:
        for _ in range(calls):
            handle()

    def allocated_workspace(calls: int) -> None:
        alloc, size = cupy.cuda.alloc, max(512, made.workspace)
        for _ in range(calls):
            alloc(size)

    def execute(calls: int) -> None:
        function = made._raw.execute
        on, descriptor = handle()._as_parameter_, made.descriptor
        pack = made._pack(pointers[0], workspace).address
        for _ in range(calls):
            function(on, descriptor, pack)

    cycled_sets: Iterator[tuple[Any, Any, Any]] = cycle(sets)
    cycled_few: Iterator[tuple[Any, Any, Any]] = cycle(sets[:FEW])
    cycled_pointers: Iterator[tuple[int, ...]] = cycle(pointers)
    return {
        "flcuda: plan(x, w, out=y)": same,
        "flcuda: plan(x, w, out=y), arrays in turn": in_turn,
        "flcuda: plan(x, w, out=y), new arrays": new,
        "flcuda: plan(x, w), a new output": allocating,
        "flcuda: plan.run(x, w, y), unchecked": unchecked,
        "flcuda: ExecutionPlan(x, w, y)": arrays_only,
        "flcuda: ExecutionPlan.run(handle, pointers)": pointers_only,
        "flcuda: ExecutionPlan.run, new pointers": new_pointers,
        "part: the checks": checked,
        "part: the checks, arrays in turn": checked_in_turn,
        "part: what follows the checks": launched,
        "part: the handle with device and stream": shared_handle,
        "part: a workspace (here of at least 512 bytes)": allocated_workspace,
        "part: cudnnBackendExecute": execute,
    }


# --- cudnn-frontend ---------------------------------------------------------------------------------------------------


def theirs(problem: Any, sets: list[tuple[Any, Any, Any]], notes: list[str]) -> dict[str, Round]:
    try:
        import cudnn
    except ImportError as error:
        notes.append(f"nvidia-cudnn-frontend is not measured: {error}")
        return {}
    half, single = cudnn.data_type.HALF, cudnn.data_type.FLOAT
    on = cudnn.create_handle()
    cudnn.set_stream(handle=on, stream=devices.current_stream())
    graph = cudnn.pygraph(
        io_data_type=half, intermediate_data_type=single, compute_data_type=single, handle=on, name="convolution"
    )
    x, w = (
        graph.tensor(name=name, dim=list(problem.shape_of(name)), stride=list(problem.strides_of(name)), data_type=half)
        for name in ("x", "w")
    )
    y = graph.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    y.set_output(True).set_data_type(half)
    y.set_dim(list(problem.shape_of("y"))).set_stride(list(problem.strides_of("y")))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    uids = tuple(tensor.get_uid() for tensor in (x, w, y))
    scratch = cupy.empty(max(1, graph.get_workspace_size()), cupy.uint8)
    workspace = scratch.data.ptr
    notes.append(
        f"nvidia-cudnn-frontend {cudnn.__version__}, cuDNN {cudnn.backend_version()}, {graph.get_workspace_size()} "
        "bytes of workspace"
    )
    pointers = [tuple(array.data.ptr for array in arrays) for arrays in sets]
    by_pointer = [dict(zip(uids, each, strict=True)) for each in pointers]
    by_array = [dict(zip(uids, arrays, strict=True)) for arrays in sets]
    raw = getattr(on, "backend_handle", on)
    lowered = getattr(graph, "_lowered_graph", None)

    def form(call: Callable[[Any], None], packs: list[Any]) -> Round:
        packs_in_turn = cycle(packs)

        def calls_of(calls: int) -> None:
            for _, pack in zip(range(calls), packs_in_turn, strict=False):
                call(pack)

        return calls_of

    forms = {
        "execute({uid: address})": (lambda pack: graph.execute(pack, workspace, handle=on), by_pointer),
        "execute({uid: CuPy array})": (lambda pack: graph.execute(pack, scratch, handle=on), by_array),
        "execute(addresses, tensor_uids=)": (
            lambda pack: graph.execute(pack, workspace, handle=on, tensor_uids=uids),
            pointers,
        ),
        "execute(CuPy arrays, tensor_uids=)": (
            lambda pack: graph.execute(pack, scratch, handle=on, tensor_uids=uids),
            sets,
        ),
        "execute_plan_at_index({uid: address})": (
            lambda pack: graph.execute_plan_at_index(pack, workspace, 0, handle=on),
            by_pointer,
        ),
        "its compiled part alone, {uid: address}": (
            lambda pack: lowered._execute_plan_at_index(pack, workspace, 0, raw, None, None, None),
            by_pointer,
        ),
    }
    forms.update(torch_forms(graph, on, uids, sets, notes))
    found: dict[str, Round] = {}
    expected = sets[0][2].copy()
    for name, (call, packs) in forms.items():
        try:
            call(packs[0])
        except Exception as error:
            notes.append(f"frontend: {name} is not measured: {type(error).__name__}: {str(error)[:120]}")
            continue
        cupy.cuda.Device().synchronize()
        if not bool((sets[0][2].view(cupy.uint16) == expected.view(cupy.uint16)).all()):
            notes.append(f"frontend: {name} gives other bits than flcuda; another engine")
        found[f"frontend: {name}"] = form(call, packs[:1])
        found[f"frontend: {name}, new arrays"] = form(call, packs)
    return found


def torch_forms(
    graph: Any, on: Any, uids: tuple[int, ...], sets: list[tuple[Any, Any, Any]], notes: list[str]
) -> dict[str, tuple[Callable[[Any], None], list[Any]]]:
    """The package reads torch's tensors faster than other arrays."""
    try:
        import torch
    except ImportError:
        notes.append("frontend with torch tensors is not measured: torch is not installed")
        return {}
    tensors = [tuple(torch.from_dlpack(array) for array in arrays) for arrays in sets]
    scratch = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    by_uid = [dict(zip(uids, each, strict=True)) for each in tensors]
    return {
        "execute({uid: torch tensor})": (lambda pack: graph.execute(pack, scratch, handle=on), by_uid),
        "execute(torch tensors, tensor_uids=)": (
            lambda pack: graph.execute(pack, scratch, handle=on, tensor_uids=uids),
            tensors,
        ),
    }


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    args = parser(__doc__).parse_args()
    problem = flcuda.Problem.parse(LINE)
    notes: list[str] = []
    sets = operands(problem)
    forms = ours(problem, sets, notes)
    forms.update(theirs(problem, sets, notes))
    show(forms, args, cupy.cuda.Device().synchronize, {"problem": LINE, "notes": notes}, 60)


if __name__ == "__main__":
    main()
