"""dev/gpu_predicted.py: what it reads from SASS and counters, and how it counts."""

import gpu_predicted
import pytest

SASS = """
	code for sm_80
		Function : _Z19gelu_forward_kernelIfEvPT_PKS1_l
        /*0000*/                   MOV R1, c[0x0][0x28] ;                   /* 0x0 */
        /*0010*/                   LDG.E.128 R4, [R2.64] ;                  /* 0x0 */
        /*0020*/              @!P0 LDG.E.128.CONSTANT R8, [R2.64+0x200] ;   /* 0x0 */
        /*0030*/                   FADD R12, R4, R8 ;                       /* 0x0 */
        /*0040*/                   LDG.E.U16 R16, [R2.64] ;                 /* 0x0 */
        /*0050*/               @P1 BRA 0x10 ;                               /* 0x0 */
        /*0060*/                   EXIT ;                                   /* 0x0 */
"""


def test_sass():
    functions = gpu_predicted.functions(SASS)
    [code] = functions.values()
    assert list(functions) == ["_Z19gelu_forward_kernelIfEvPT_PKS1_l"] and len(code) == 7
    assert [len(loop) for loop in gpu_predicted.loops(code)] == [5]
    assert gpu_predicted.loads_under_way(code) == 32  # two of 16 bytes before the addition needs them


def test_operations_have_their_kernels():
    kernels = ["_Z19gelu_forward_kernelIfEvPT_PKS1_l", "_Z18column_sums_kernelIfLi4E11BiasColumnsIfEEvPf"]
    assert gpu_predicted.kernels_of("gelu_forward", kernels) == kernels[:1]
    assert gpu_predicted.kernels_of("bias_backward", kernels) == kernels[1:]
    gpu_predicted.check_claims(kernels, ["gelu_forward", "matmul"])
    with pytest.raises(SystemExit):
        gpu_predicted.check_claims(kernels, ["layernorm_forward"])
    with pytest.raises(SystemExit):
        gpu_predicted.check_claims(["_Z10new_kernelIfEvPT_"], [])


def test_counters():
    counters = gpu_predicted.read_counters("kernel launches instructions\n_Z1av 2 10\n_Z1bv 1 5\n")
    assert counters == {"_Z1av": {"launches": 2, "instructions": 10}, "_Z1bv": {"launches": 1, "instructions": 5}}


def test_occupancy():
    gpu = gpu_predicted.GPUS["A100"]
    assert gpu_predicted.warps_on(gpu, 32, 256, 0) == 64
    assert gpu_predicted.warps_on(gpu, 255, 256, 0) == 8
    assert gpu_predicted.warps_on(gpu, 32, 128, 80 << 10) == 8


def test_an_operation_takes_its_longest_bound():
    gpu = gpu_predicted.GPUS["H100"]
    name = "_Z19gelu_forward_kernelIfEvPT_PKS1_l"
    small = {"gelu_forward": {"flops": 0, "bytes": 3200, "calls": 1}}
    kernels = {name: gpu_predicted.Kernel(instructions=1000, tensor_flops=0, distinct_sectors=200, global_bytes=3200, launches=1)}
    cost = {"flops": 0, "bytes": 3.2e9, "calls": 4}
    def bounds_with(little):
        unit = gpu_predicted.unit_of("gelu_forward", small, kernels, {name: {"little": little, "sass": 1}})
        return gpu_predicted.operation_seconds(gpu, cost, unit)

    bounds, launches = bounds_with(2)
    assert launches == 4 and bounds["tensor"] == 0
    # The kernel touches twice the bytes that the plan counts.
    assert bounds["memory"] == pytest.approx(6.4e9 / (3.35e12 * 0.85))
    assert bounds["issue"] == pytest.approx(1e9 / (4 * 132 * 1.83e9))
    slower, _ = bounds_with(0.5)
    assert slower["memory"] == pytest.approx(6.4e9 / (3.35e12 * 0.5))


def test_products_come_in_whole_waves():
    gpu = gpu_predicted.GPUS["A100"]
    whole, more = (gpu_predicted.product_seconds(gpu, f"matmul {m} x 256 x 512 NN", 1e12, 0, 1)[0]["tensor"]
                   for m in (13824, 13952))  # 108 tiles, and 109
    assert more == pytest.approx(2 * 108 / 109 * whole)


def test_a_short_sum_is_slower():
    """A tile takes some time besides its products. The best rate is that of a long sum."""
    gpu = gpu_predicted.GPUS["H100"]
    shares = [gpu_predicted.product_share(gpu, 132 * 128, 256 * 8, k) for k in (256, 768, 1600, 4096, 65536)]
    assert shares == sorted(shares) and shares[0] < 0.65 and shares[-1] > 0.99
    assert shares[1] * gpu.products == pytest.approx(660e12, rel=0.02)
    idle = [k * (1 / share - 1) for k, share in zip((256, 768, 1600), shares)]
    assert idle == pytest.approx([idle[0]] * 3)  # the same number of steps of k
    for shape, (published, _) in gpu_predicted.PRODUCTS.items():
        assert gpu_predicted.product_share(gpu, *shape) * gpu.products == pytest.approx(published * 1e12, rel=0.09)


def test_cutting_a_sum_fills_the_gpu_but_costs_tiles():
    gpu = gpu_predicted.GPUS["A100"]
    few = gpu_predicted.product_share(gpu, 128, 256, 65536)  # one tile on 108 multiprocessors
    assert 12 / 108 < few < 16 / 108
    assert gpu_predicted.product_share(gpu, 128, 256, 512) < 1 / 108


def test_a_line_through_counts():
    of = gpu_predicted.fitted({n: 3 + 7 / n for n in gpu_predicted.COUNTED})
    assert of(4096) == pytest.approx(3 + 7 / 4096) and of(10**9) == pytest.approx(3)


PTX = """
.visible .entry _Z4loopv(
	.param .u64 a
)
{
	mov.u32 	%r1, 0;
$L__BB0_1:
	// begin inline asm
	{
 mma.sync.aligned %r2;
}
	// end inline asm
$L__BB0_2:
	add.s32 	%r1, %r1, 1;
	@%p1 bra 	$L__BB0_2;
	add.s32 	%r1, %r1, 2;
	@!%p2 bra 	$L__BB0_1;
	bra.uni 	$L__BB0_3;
$L__BB0_3:
	ret;
}
.visible .entry _Z8straightv()
{
	ret;
}
"""


def test_loops_of_ptx():
    assert gpu_predicted.ptx_loops(PTX) == {"_Z4loopv": [2, 5], "_Z8straightv": []}


def test_instructions_of_a_long_loop_are_those_of_sass():
    """For a loop that ptxas may unroll, those of PTX."""
    long = [(16 * i, "FADD R1, R1, R2") for i in range(150)] + [(2400, "BRA 0x0")]
    assert gpu_predicted.sass_a_ptx(long, [300]) == pytest.approx(151 / 300)
    assert gpu_predicted.sass_a_ptx(long, [30]) == gpu_predicted.sass_a_ptx(long, [300, 200]) == 1
    assert gpu_predicted.sass_a_ptx(long[-20:], [300]) == gpu_predicted.sass_a_ptx(long, []) == 1
