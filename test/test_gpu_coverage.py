"""dev/gpu_coverage.py: the counts of several runs are merged, by architecture."""

import gpu_coverage


def test_runs_count_together(tmp_path, capsys):
    collected = tmp_path / "coverage"
    collected.write_text("sm_80 _Z1av 1100\nsm_80 _Z1av 0110\nsm_80 _Z1bv 11\nsm_90a _Z1av 11111\n")
    assert gpu_coverage.main([str(collected)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:4] == ["1", "of", "4", "sm_80"] and len(said) == 3
    assert said[1].startswith("sm_80: 6 instructions in 2 kernels, 16.7%")
    assert said[2].startswith("sm_90a: 5 instructions in 1 kernels, 0.0%")
    assert gpu_coverage.main([str(collected), "--most", "17"]) == 0


PTX = """.version 9.0
.target sm_80
.address_size 64
.visible .entry _Z1av(
.param .u64 _Z1av_param_0
)
{
.reg .pred %p<2>;
.loc 1 40 0
ld.param.u64 %rd1, [_Z1av_param_0];
{ .reg .pred p; setp.eq.u32 p, %r1, 0; }
.loc 2 7 3, function_name $L__info_string0, inlined_at 1 42 5
st.global.v2.u32 [%rd1], {%r1,
%r2};
$L__BB0_1: bra $L__BB0_1;
}
.file 1 "ROOT/./llmc/column_sums.cuh"
.file 2 "ROOT/llmc/elementwise.cuh"
.file 3 "/usr/include/math.h"
.section .debug_str
{
$L__info_string0:
.b8 95,0
}
"""


def test_instructions_have_lines_of_the_source(tmp_path):
    (tmp_path / "program").write_bytes(b"\x7fELF\0" + PTX.replace("ROOT", str(gpu_coverage.ROOT)).encode() + b"\0\1")
    (tmp_path / "program.o").write_bytes(b"")
    places = gpu_coverage.places_of(tmp_path, {("sm_80", "_Z1av")})
    own, inlined = (("llmc/column_sums.cuh", 40),), (("llmc/column_sums.cuh", 42), ("llmc/elementwise.cuh", 7))
    assert places == {("sm_80", "_Z1av", 4): [own, own, inlined, inlined]}


def test_what_is_left_is_told_by_line(tmp_path):
    (tmp_path / "program").write_bytes(PTX.replace("ROOT", str(gpu_coverage.ROOT)).encode())
    rows = gpu_coverage.left_of_kernels({("sm_80", "_Z1av", 4): 0b1100}, {"_Z1av": "a"}, tmp_path)
    assert [(count, where) for count, where, _, _ in rows] == [(2, "a llmc/column_sums.cuh:42 llmc/elementwise.cuh:7")]
    said = gpu_coverage.summary("Instructions", rows, 4)
    assert said[0] == "## Instructions: 50.00% of 4 never executed" and "no reason is known" in said[2]


def test_lines_that_a_preprocessor_leaves():
    text = '# 1 "train_gpt.cu"\n# 7 "./llmc/device.h" 1\nint a;\n\n  int b;\n# 3 "train_gpt.cu" 2\nint c;\n'
    assert gpu_coverage.sources(text) == {"llmc/device.h": {7, 9}, "train_gpt.cu": {3}}


def test_reasons():
    assert "9.0" in gpu_coverage.reason(gpu_coverage.KERNEL_REASONS, "sm_80 hopper_attention_forward_kernel<64>: __trap();")
    assert gpu_coverage.reason(gpu_coverage.KERNEL_REASONS, "sm_90a hopper_attention_forward_kernel<64>: setmaxnreg_dec();") == "?"
    assert gpu_coverage.reason(gpu_coverage.LINE_REASONS, "cudaGetDeviceProperties(&properties, 0)") != "?"
