"""backends.resolve: what is chosen for which tensors, why, and what an explicit choice that cannot run is told."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

from trace_fast import native
from trace_fast.backends import CHOICES, PREFERRED, fastest, resolve
from trace_fast.errors import ConfigError

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_native = pytest.mark.skipif(not native.status().available, reason=f"native module: {native.status().reason}")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (pip install triton)")

NO_TRITON_HERE = (
    r"Triton kernels run on CUDA devices \(or in Triton's interpreter\), got cpu"
    if HAS_TRITON
    else "Triton is not installed"
)
ON_CPU = f"auto: the fastest that runs on cpu; prefix_attention not triton: {NO_TRITON_HERE}; "
NO_GRADIENT = "prefix_attention not torch: it has no gradient"
AND_HEAD = f"token_logprob not triton: {NO_TRITON_HERE}"


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A compute capability in place of a device: all that the choice asks one."""
    capability: tuple[int, int] = request.param
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    return capability


CPU_TABLE: list[Any] = [
    # dtype, training, attention, log-probabilities, reason
    pytest.param(F32, False, "native", "torch", f"{ON_CPU}{AND_HEAD}", marks=needs_native),
    pytest.param(BF16, False, "native", "torch", f"{ON_CPU}{AND_HEAD}", marks=needs_native),
    pytest.param(F16, True, "native", "torch", f"{ON_CPU}{NO_GRADIENT}; {AND_HEAD}", marks=needs_native),
    (
        F64,
        False,
        "torch",
        "torch",
        rf"{ON_CPU}prefix_attention not native: the C\+\+ kernel takes .*, got torch.float64; {AND_HEAD}",
    ),
    (
        F64,
        True,
        "reference",
        "torch",
        rf"{ON_CPU}prefix_attention not native: the C\+\+ kernel takes .*, got torch.float64; "
        f"{NO_GRADIENT}; {AND_HEAD}",
    ),
]


@pytest.mark.parametrize("head_dim", [None, 64, 512])
@pytest.mark.parametrize(("dtype", "training", "attention", "logprob", "reason"), CPU_TABLE)
def test_auto_on_the_cpu(
    dtype: torch.dtype, training: bool, attention: str, logprob: str, reason: str, head_dim: int | None
) -> None:
    found = resolve("auto", CPU, dtype, head_dim=head_dim, training=training)
    assert (found.prefix_attention, found.token_logprob) == (attention, logprob)
    assert_fully(reason, found.reason)


ON_CUDA = "auto: the fastest that runs on cuda"
NO_NATIVE = r"; prefix_attention not native: the C\+\+ kernel runs on the CPU, got cuda"
CUDA_TABLE: list[Any] = [
    # capability, dtype, dtype of the head, head dim, training, attention, log-probabilities, reason
    ((9, 0), BF16, None, 128, False, "triton", "triton", ON_CUDA + NO_NATIVE),
    ((9, 0), F16, F16, 256, True, "triton", "triton", f"{ON_CUDA}{NO_NATIVE}; {NO_GRADIENT}"),
    (
        *((9, 0), BF16, F32, None, False, "triton", "torch"),
        f"{ON_CUDA}{NO_NATIVE}; token_logprob not triton: Triton kernels need rows and head of one dtype, got "
        "torch.bfloat16 and torch.float32",
    ),
    (
        *((9, 0), BF16, None, 512, False, "torch", "triton"),
        rf"{ON_CUDA}; prefix_attention not triton: the Triton kernels take head dims up to \d+ in torch.bfloat16, got "
        f"512{NO_NATIVE}",
    ),
    (
        *((9, 0), BF16, None, 512, True, "reference", "triton"),
        rf"{ON_CUDA}; prefix_attention not triton: the Triton kernels take head dims up to \d+ in torch.bfloat16, got "
        f"512{NO_NATIVE}; {NO_GRADIENT}",
    ),
    (
        *((7, 5), F16, None, 64, False, "torch", "torch"),
        f"{ON_CUDA}; prefix_attention not triton: the Triton kernels need compute capability 8.0 or more, got 7.5"
        f"{NO_NATIVE}; token_logprob not triton: Triton kernels need compute capability 8.0, got 7.5",
    ),
    (
        *((9, 0), F64, None, None, False, "torch", "torch"),
        f"{ON_CUDA}; prefix_attention not triton: the Triton kernels take .*, got torch.float64{NO_NATIVE}; "
        "token_logprob not triton: Triton kernels take float32, bfloat16 or float16 rows, got torch.float64",
    ),
]


@needs_triton
@pytest.mark.parametrize(
    ("gpu", "dtype", "head_dtype", "head_dim", "training", "attention", "logprob", "reason"),
    CUDA_TABLE,
    indirect=["gpu"],
)
def test_auto_on_a_gpu(
    gpu: tuple[int, int],
    dtype: torch.dtype,
    head_dtype: torch.dtype | None,
    head_dim: int | None,
    training: bool,
    attention: str,
    logprob: str,
    reason: str,
) -> None:
    found = resolve("auto", CUDA, dtype, head_dtype=head_dtype, head_dim=head_dim, training=training)
    assert (found.prefix_attention, found.token_logprob) == (attention, logprob)
    assert_fully(reason, found.reason)


EXPLICIT: list[Any] = [
    # asked for, training, attention, log-probabilities, reason
    pytest.param("native", False, "native", "torch", f"chosen explicitly; {AND_HEAD}", marks=needs_native),
    pytest.param("native", True, "native", "torch", f"chosen explicitly; {AND_HEAD}", marks=needs_native),
    ("torch", False, "torch", "torch", "chosen explicitly"),
    ("reference", True, "reference", "reference", "chosen explicitly"),
]


@pytest.mark.parametrize(("requested", "training", "attention", "logprob", "reason"), EXPLICIT)
def test_an_explicit_choice_is_taken(
    requested: str, training: bool, attention: str, logprob: str, reason: str
) -> None:
    found = resolve(requested, CPU, F32, training=training)
    assert (found.prefix_attention, found.token_logprob) == (attention, logprob)
    assert_fully(reason, found.reason)


REFUSED: list[Any] = [
    # asked for, device, dtype, training, message
    ("triton", CPU, F32, False, f"'triton' was asked for, but for prefix_attention {NO_TRITON_HERE}"),
    (
        *("native", CPU, F64, False),
        r"'native' was asked for, but for prefix_attention the C\+\+ kernel takes float32, bfloat16 or float16, "
        "got torch.float64",
    ),
    (
        *("native", META, F32, False),
        r"'native' was asked for, but for prefix_attention the C\+\+ kernel runs on the CPU, got meta",
    ),
    ("torch", CPU, F32, True, "'torch' was asked for, but for prefix_attention it has no gradient"),
    ("cuda", CPU, F32, False, "expected auto, triton, native, torch, reference, got 'cuda'"),
    ("", CPU, F32, False, "expected auto, triton, native, torch, reference, got ''"),
    ("Native", CPU, F32, False, "expected auto, triton, native, torch, reference, got 'Native'"),
]


@pytest.mark.parametrize(("requested", "device", "dtype", "training", "message"), REFUSED)
def test_an_explicit_choice_that_cannot_run_is_told_why(
    requested: str, device: torch.device, dtype: torch.dtype, training: bool, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(requested, device, dtype, training=training)
    assert_fully(f"backend: {message}", str(refused.value))


@needs_triton
@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_an_explicit_choice_has_to_serve_both_ops(gpu: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"'triton' was asked for, but for token_logprob .* torch\.bfloat16 and"):
        resolve("triton", CUDA, BF16, head_dtype=F32)
    with pytest.raises(ConfigError, match=r"'triton' was asked for, but for prefix_attention .* got 512"):
        resolve("triton", CUDA, BF16, head_dim=512)


def test_every_name_is_known_to_some_op() -> None:
    assert {name for op in ("prefix_attention", "token_logprob") for name in PREFERRED[op]} == set(CHOICES)


@needs_native
@pytest.mark.parametrize(
    ("op", "dtype", "name"),
    [
        ("turn_credit", F32, "native"),
        ("turn_credit", F64, "native"),
        ("turn_credit", F16, "reference"),
        ("policy_loss", F32, "native"),
        ("policy_loss", BF16, "reference"),
    ],
)
def test_the_fastest_for_credit_and_loss(op: str, dtype: torch.dtype, name: str) -> None:
    assert fastest(op, CPU, dtype) == name


def assert_fully(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text
