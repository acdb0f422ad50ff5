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
