"""dev/gpu_coverage.py: what several runs executed counts together, by architecture."""

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


def test_lines_that_a_preprocessor_leaves():
    text = '# 1 "train_gpt.cu"\n# 7 "./llmc/device.h" 1\nint a;\n\n  int b;\n# 3 "train_gpt.cu" 2\nint c;\n'
    assert gpu_coverage.sources(text) == {"llmc/device.h": {7, 9}, "train_gpt.cu": {3}}


def test_reasons():
    assert "9.0" in gpu_coverage.reason(gpu_coverage.KERNEL_REASONS, "sm_80 hopper_attention_forward_kernel<64>")
    assert gpu_coverage.reason(gpu_coverage.KERNEL_REASONS, "sm_90a hopper_attention_forward_kernel<64>") == "?"
    assert gpu_coverage.reason(gpu_coverage.LINE_REASONS, "~Event() { cudaEventDestroy(event_); }") != "?"
