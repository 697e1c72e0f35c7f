"""Test the CUDA runtime without a device by its C functions, and the counts and the model that come of it."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NODEVICE = Path(__file__).parents[2] / "benchmarks/gpu/nodevice"
UNSUPPORTED, INVALIDATED, NO_MEMORY = 900, 901, 2


class Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Compile runtime and driver with Triton's copy of CUDA's headers; cuBLAS's are in no wheel here."""
    triton = pytest.importorskip("triton")
    if shutil.which("gcc") is None:
        pytest.skip("NOT TESTED: the runtime without a device needs gcc")
    headers = Path(triton.__file__).with_name("backends") / "nvidia/include"
    library = tmp_path_factory.mktemp("nodevice") / "libcuda.so.1"
    sources = [NODEVICE / "runtime.c", NODEVICE / "driver.c"]
    command = ["gcc", "-std=gnu11", "-w", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{headers}"]
    subprocess.run([*command, *sources, "-o", library, "-ldl", "-lpthread"], check=True)
    return library


@pytest.fixture
def cuda(built, gpu_benchmarks):
    """The runtime's functions; the counts begin at zero."""
    library = ctypes.CDLL(str(built))
    library.nodevice_launched.restype = ctypes.c_ulong
    library.nodevice_reset()
    return library


def counts(cuda, tmp_path):
    import nodevice

    assert cuda.nodevice_dump(bytes(tmp_path / "counts.txt")) == 0
    sums, work = nodevice.read((tmp_path / "counts.txt").read_text())
    return sums, {of.name: of for of in work}


def a_kernel(cuda, name):
    """Register a kernel as Triton's launcher does; return its handle."""
    function = ctypes.c_void_p()
    cuda.cuModuleGetFunction(ctypes.byref(function), None, name)
    return function


def launch(cuda, kernel, stream):
    assert cuda.cuLaunchKernel(kernel, 7, 2, 1, 128, 1, 1, 0, stream, None, None) == 0


def test_launches_copies_and_waits_are_counted(cuda, tmp_path):
    add, device, small = a_kernel(cuda, b"add"), ctypes.c_void_p(), ctypes.create_string_buffer(b"seven")
    for _ in range(3):
        launch(cuda, add, None)
    assert cuda.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(1000)) == 0
    assert cuda.cudaMemcpyAsync(device, small, ctypes.c_size_t(5), 1, None) == 0
    assert cuda.cudaStreamSynchronize(None) == cuda.cudaDeviceSynchronize() == 0
    sums, work = counts(cuda, tmp_path)
    assert (sums["waits"], sums["allocations"], sums["copies of pageable memory"]) == (2, 1, 1)
    assert work["add"][:5] == (3, 0, "7x2x1", 128, 0) and work["add"].kind == "kernel"
    assert work["copy: pageable memory to device"].kind == "copy"
    assert ctypes.string_at(device, 5) == b"seven"  # small copies are done
    cuda.nodevice_reset()
    assert counts(cuda, tmp_path) == (dict.fromkeys(sums, 0) | {"captures": sums["captures"]}, {})


def test_work_of_a_graph_counts_when_the_graph_is_launched(cuda, tmp_path):
    add, stream, beside, graph = a_kernel(cuda, b"add in graph"), *(ctypes.c_void_p() for _ in range(3))
    event = ctypes.c_void_p()
    for made in (stream, beside):
        assert cuda.cudaStreamCreate(ctypes.byref(made)) == 0
    cuda.cudaEventCreate(ctypes.byref(event))
    assert cuda.cudaStreamBeginCapture(stream, 0) == 0
    number = cuda.nodevice_capturing()
    launch(cuda, add, stream)
    cuda.cudaEventRecord(event, stream)
    cuda.cudaStreamWaitEvent(beside, event, 0)  # so this stream is captured too
    launch(cuda, add, beside)
    launch(cuda, add, None)  # another stream's work runs at once
    assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    for _ in range(4):
        cuda.cudaGraphLaunch(graph, stream)
    sums, work = counts(cuda, tmp_path)
    assert (work["add in graph"].called, work["add in graph"].replayed) == (1, 8)
    assert sums["graph launches"] == cuda.nodevice_launched(number) == 4 and not cuda.nodevice_capturing()


def test_a_wait_in_a_capture_is_refused_and_spoils_it(cuda, tmp_path, capfd):
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cudaStreamCreate(ctypes.byref(stream))
    cuda.cudaStreamBeginCapture(stream, 1)  # thread_local
    assert cuda.cudaStreamSynchronize(stream) == UNSUPPORTED
    assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == INVALIDATED
    cuda.cudaStreamBeginCapture(stream, 2)  # relaxed: only the captured stream is out of bounds
    assert cuda.cudaStreamSynchronize(None) == 0
    assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    sums, _ = counts(cuda, tmp_path)
    assert (sums["refused"], sums["waits"]) == (1, 1)
    assert "cudaStreamSynchronize is not permitted while a stream is captured" in capfd.readouterr().err


def some_work(nodevice, name, called=0, replayed=0):
    return nodevice.Work(called, replayed, "1x1x1", 128, 0, name)


@pytest.mark.long
@pytest.mark.inductor
def test_the_model_counts_bytes_and_flops_of_compiled_graphs_and_products(
    gpu_benchmarks, tmp_path, monkeypatch
):
    """A CPU's graph: a product by torch's own library, and a kernel that Inductor writes."""
    import model
    import nodevice
    from torch._inductor.graph import GraphLowering
    from torch._inductor.output_code import CompiledFxGraph

    monkeypatch.setattr(GraphLowering, "compile_to_module", GraphLowering.compile_to_module)
    monkeypatch.setattr(CompiledFxGraph, "__call__", CompiledFxGraph.__call__)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    library = type("Library", (), {"capture": 0, "launched": 3})()
    library.nodevice_capturing = lambda: library.capture
    library.nodevice_launched = lambda number: library.launched
    recorder = model.Recorder(tmp_path, library)
    x = torch.ones(1024, 1024)
    both = torch.compile(lambda x: torch.mm(x, x).relu(), dynamic=False)
    both(x)
    (noted,) = tmp_path.iterdir()
    ((kind, moved, flops),) = model.json.loads(noted.read_text())
    assert (kind, flops) == ("compiled elementwise and reductions", 0) and moved == 2 * x.nbytes
    library.capture = 1
    both(x)
    work = [some_work(nodevice, "product 1024 x 1024 x 1024", 1, 3), some_work(nodevice, "poi", 1, 5)]
    found, unknown = recorder.seconds(work)
    assert not unknown
    assert found["compiled elementwise and reductions"] == pytest.approx(4 * moved / model.COPY)
    assert found["products"] == pytest.approx(4 * 2 * 1024**3 / model.RATES["products"])
    assert found["other launches, at least"] == pytest.approx(2 * model.SMALLEST)
    recorder.reset()
    library.launched = 0
    assert sum(recorder.seconds([])[0].values()) == 0


def test_count_says_what_it_needs_where_torch_has_no_cuda(tmp_path):
    if torch.version.cuda:
        pytest.skip("this torch has CUDA")
    command = [sys.executable, str(NODEVICE.parent / "count.py"), "smoke"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "only kernels for CUDA can be counted" in done.stderr
