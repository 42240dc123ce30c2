"""Files of results of autotuning: what is read, the full text of every message, and what is written."""

import re
from textwrap import dedent

import pytest
from hypothesis import given, strategies as st

from stagec.core.messages.errors import StagecError
from stagec.hardware import autotuning, cuda as gpus

H200 = "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 4814 GB/s, L2 cache: 60 MB"
TRITON = "triton { block_m: 64 block_n: 32 block_k: 32 num_stages: 3 num_warps: 4 num_ctas: 1 }"
REFRESH = f"\n  {autotuning.REFRESH}"


def entry(chosen: str = TRITON, device: str = f"{H200}, DNN version: 9.15.1", hlo: str = "{}", more: str = "") -> str:
    return f'results {{ device: "{device}" hlo: "{hlo}" result {{ {chosen} }} {more} }}\n'


def problems_of(text: str) -> str:
    with pytest.raises(StagecError) as caught:
        autotuning.read(text, "m/h.textproto")
    return str(caught.value)


def test_an_empty_file_has_no_results() -> None:
    assert autotuning.read("") == autotuning.read("# none yet\n") == autotuning.read("version: 3") == []
    assert autotuning.cudnn([]) is None


def test_what_is_read_is_written_again() -> None:
    other = (
        """other { name: "NATIVE_EMITTER" config { [type.googleapis.com/xla.gpu.NativeEmitterBackendConfig] { } } }"""
    )
    text = "version: 3\n" + entry(hlo=r"{\n  \"a\"}", more="version: 41") + entry(other, hlo="b")
    found = autotuning.read(text)
    assert autotuning.read(autotuning.write(found, "again")) == found
    assert [one.version for one in found] == [41, None]
    autotuning.check(found, gpus.device("h200"))
    assert autotuning.cudnn(found) == (9, 15, 1)


def test_all_spellings_of_the_format_are_read() -> None:
    text = "version: 3 # of the file\nresults <\n  device: '" + H200 + ", ' \"DNN version: 9.15.1\",\n  hlo: '{}';"
    assert autotuning.read(text + " result: { " + TRITON + " } >") == autotuning.read("version: 3 " + entry())


def test_how_long_a_kernel_took_is_left_out() -> None:
    timed = autotuning.read("version: 3 " + entry(TRITON + " run_time { nanos: 7 } scratch_bytes: 9"))
    assert timed == autotuning.read("version: 3 " + entry())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\nversion: @", "line 3: not protobuf's text format: @"),
        ("version: 3 results {", "line 1: not protobuf's text format: the end is not expected here"),
        ("version 3", "line 1: not protobuf's text format: 3 is not expected here"),
        ("a {" * 5000, "line 1: not protobuf's text format: { is not expected here"),
        ('version: "3', "line 1: not protobuf's text format: \"3"),
        ("version: 2", "version: results of version 2; this XLA reads 3"),
        (entry(), "version: results of version 0; this XLA reads 3"),
        ("version: 3 results: 1", "results[0]: not a message"),
        ("version: 3 " + entry() + entry(), "results[1]: a second result for the same kernel"),
        ("version: 3 " + entry(more="extra: 1"), "results[0]: unknown field extra"),
        ("version: 3 " + entry(more='hlo: "b"'), "results[0]: a field stands twice"),
        ("version: 3 " + entry(more="version: -1"), "results[0]: version is not a number"),
        (
            "version: 3 results { }",
            "results[0]: device does not say properties and a version of cuDNN, as XLA writes them",
        ),
        (
            "version: 3 " + entry(device=H200),
            "results[0]: device does not say properties and a version of cuDNN, as XLA writes them",
        ),
        ("version: 3 " + entry().replace("hlo", "result"), "results[0]: a field stands twice"),
        ("version: 3 " + entry().replace('hlo: "{}"', ""), "results[0]: it has no hlo and result"),
        ("version: 3 " + entry(""), "results[0]: it chooses nothing; XLA takes one of gemm, triton, algorithm, other"),
        (
            "version: 3 " + entry("conv { algorithm: 1 }"),
            "results[0]: it chooses conv; XLA takes one of gemm, triton, algorithm, other",
        ),
        (
            "version: 3 " + entry(TRITON + " gemm { algorithm: 1 }"),
            "results[0]: it chooses triton, gemm; XLA takes one of gemm, triton, algorithm, other",
        ),
        ("version: 3 " + entry("triton { block_m: 16 }"), "results[0]: triton has no block_n"),
        (
            "version: 3 " + entry(TRITON.replace("block_n: 32", "block_n: -32")),
            "results[0]: block_n is -32, which is not a power of two",
        ),
        (
            "version: 3 " + entry(TRITON.replace("num_stages: 3", "num_stages: 0")),
            "results[0]: num_stages is 0, which is not positive",
        ),
        (
            "version: 3 " + entry("other { config { [a.b/c] { num_warps: 6 } } }"),
            "results[0]: num_warps is 6, which is not a power of two",
        ),
    ],
)
def test_what_xla_would_not_read_or_would_pass_over(text: str, message: str) -> None:
    assert problems_of(text) == f"m/h.textproto: {message}{REFRESH}"


def test_all_problems_are_told_together() -> None:
    assert problems_of("version: 1 resluts { } " + entry("")) == dedent(
        f"""\
        m/h.textproto: version: results of version 1; this XLA reads 3
          {autotuning.REFRESH}
        m/h.textproto: resluts: unknown field
          did you mean "results"?
        m/h.textproto: results[0]: it chooses nothing; XLA takes one of gemm, triton, algorithm, other
          {autotuning.REFRESH}"""
    )


def test_results_of_another_device_or_of_two_versions_of_cudnn() -> None:
    found = autotuning.read("version: 3 " + entry() + entry(device=f"{H200}, DNN version: 9.12.0", hlo="b"))
    with pytest.raises(StagecError) as caught:
        autotuning.check(found, gpus.device("h200"), "h.textproto")
    assert str(caught.value) == (
        f"h.textproto: results: timed with cuDNN 9.12.0 and 9.15.1: XLA finds those of one{REFRESH}"
    )
    with pytest.raises(StagecError) as caught:
        autotuning.check(found[:1], gpus.device("l4"), "h.textproto")
    assert str(caught.value) == (
        f"h.textproto: results[0].device: timed on {H200}, DNN version: 9.15.1, and NVIDIA L4 is "
        "CUDA: 8.9, Cores: 58, GPU clock: 2.04 GHz, Memory bandwidth: 300 GB/s, L2 cache: 48 MB" + REFRESH
    )


_PIECES = [entry(), entry(hlo="b"), entry(hlo="c", more="version: 41"), "version: 3 ", "results ", " # note\n", "\n"]
_MARKS = st.text(st.sampled_from('versionresult{}<>:"3#\\ \n[]/.,;-'), max_size=3)


@given(st.lists(st.sampled_from(_PIECES) | _MARKS).map(lambda pieces: "version: 3 " + "".join(pieces)))
def test_any_text_is_read_or_explained(text: str) -> None:
    try:
        found = autotuning.read(text, "h.textproto")
    except StagecError as refusal:
        for problem in refusal.problems:
            line = re.match(r"line (\d+): ", problem.what)
            assert problem.file == "h.textproto"
            assert problem.write
            assert problem.key if line is None else 1 <= int(line[1]) <= text.count("\n") + 1
    else:
        assert autotuning.read(autotuning.write(found, "again")) == found
