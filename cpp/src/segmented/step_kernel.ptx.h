// step_kernel.cu for any GPU that TensorRT runs on, written by tools/step_kernel.py.
#pragma once

namespace tide {

constexpr char kStepKernel[] = R"(.version 8.7
.target sm_75
.address_size 64
.extern .func cudaGraphSetConditional
(
	.param .b64 cudaGraphSetConditional_param_0,
	.param .b32 cudaGraphSetConditional_param_1
)
;
.visible .entry tide_decide(
	.param .align 8 .b8 tide_decide_param_0[96],
	.param .u32 tide_decide_param_1,
	.param .u64 tide_decide_param_2
)
{
	.reg .pred 	%p<59>;
	.reg .b16 	%rs<12>;
	.reg .f32 	%f<7>;
	.reg .b32 	%r<93>;
	.reg .f64 	%fd<5>;
	.reg .b64 	%rd<144>;
	.shared .align 4 .u32 _ZZ11tide_decideE7longest;
	ld.param.v2.u32 	{%r33, %r34}, [tide_decide_param_0+80];
	ld.param.v2.u32 	{%r35, %r36}, [tide_decide_param_0+88];
	ld.param.u32 	%r32, [tide_decide_param_1];
	ld.param.u64 	%rd71, [tide_decide_param_2];
	ld.param.u64 	%rd70, [tide_decide_param_0+72];
	ld.param.u64 	%rd69, [tide_decide_param_0+64];
	ld.param.u64 	%rd68, [tide_decide_param_0+56];
	ld.param.u64 	%rd67, [tide_decide_param_0+48];
	ld.param.u64 	%rd66, [tide_decide_param_0+40];
	ld.param.u64 	%rd65, [tide_decide_param_0+32];
	ld.param.u64 	%rd64, [tide_decide_param_0+24];
	ld.param.u64 	%rd63, [tide_decide_param_0+16];
	ld.param.u64 	%rd62, [tide_decide_param_0+8];
	ld.param.u64 	%rd61, [tide_decide_param_0];
	cvta.to.global.u64 	%rd1, %rd62;
	cvta.to.global.u64 	%rd2, %rd66;
	cvta.to.global.u64 	%rd3, %rd67;
	cvta.to.global.u64 	%rd4, %rd70;
	mov.u32 	%r91, %tid.x;
	setp.ne.s32 	%p1, %r91, 0;
	@%p1 bra 	$L__BB0_2;
	mov.u32 	%r37, 0;
	st.shared.u32 	[_ZZ11tide_decideE7longest], %r37;
$L__BB0_2:
	setp.ge.s32 	%p2, %r91, %r33;
	mul.wide.s32 	%rd72, %r91, 12;
	add.s64 	%rd5, %rd3, %rd72;
	mad.lo.s32 	%r39, %r35, %r32, %r91;
	cvt.s64.s32 	%rd6, %r39;
	cvta.to.global.u64 	%rd73, %rd63;
	mul.wide.s32 	%rd74, %r39, 8;
	add.s64 	%rd7, %rd73, %rd74;
	mul.wide.s32 	%rd75, %r91, 16;
	add.s64 	%rd8, %rd1, %rd75;
	mov.u16 	%rs11, 0;
	mov.u32 	%r86, 0;
	@%p2 bra 	$L__BB0_9;
	ld.global.u32 	%r40, [%rd5+8];
	setp.ne.s32 	%p3, %r40, 0;
	selp.u32 	%r86, 1, 0, %p3;
	setp.eq.s32 	%p4, %r40, 0;
	@%p4 bra 	$L__BB0_9;
	st.global.u32 	[%rd5+4], %r32;
	setp.eq.s32 	%p5, %r34, %r32;
	@%p5 bra 	$L__BB0_9;
	ld.global.u32 	%r85, [%rd5];
	setp.gt.s32 	%p6, %r85, -1;
	@%p6 bra 	$L__BB0_8;
	add.s32 	%r7, %r32, -1;
	mad.lo.s32 	%r41, %r7, %r35, %r91;
	cvta.to.global.u64 	%rd76, %rd65;
	mul.wide.s32 	%rd77, %r41, 4;
	add.s64 	%rd78, %rd76, %rd77;
	ld.global.u32 	%r42, [%rd78];
	setp.eq.s32 	%p7, %r42, 0;
	@%p7 bra 	$L__BB0_8;
	add.s32 	%r84, %r32, -1;
	st.global.u32 	[%rd5], %r84;
	mov.u32 	%r85, %r7;
$L__BB0_8:
	ld.global.u64 	%rd79, [%rd8];
	ld.global.u64 	%rd80, [%rd7];
	setp.gt.s64 	%p8, %rd80, %rd79;
	selp.u16 	%rs8, 1, 0, %p8;
	shr.u32 	%r43, %r85, 31;
	cvt.u16.u32 	%rs9, %r43;
	or.b16  	%rs11, %rs8, %rs9;
$L__BB0_9:
	{ 
	.reg .pred 	%p1; 
	setp.ne.u32 	%p1, %r86, 0; 
	bar.red.popc.u32 	%r10, 0, %p1; 
	}
	cvt.u32.u16 	%r44, %rs11;
	{ 
	.reg .pred 	%p1; 
	setp.ne.u32 	%p1, %r44, 0; 
	bar.red.popc.u32 	%r11, 0, %p1; 
	}
	cvta.to.global.u64 	%rd9, %rd61;
	setp.le.s32 	%p9, %r34, %r32;
	@%p9 bra 	$L__BB0_27;
	@%p2 bra 	$L__BB0_25;
	setp.lt.s32 	%p11, %r11, 1;
	@%p11 bra 	$L__BB0_14;
	cvt.s64.s32 	%rd81, %r11;
	ld.global.u32 	%r45, [%rd9+8];
	cvt.s64.s32 	%rd82, %r45;
	setp.ne.s32 	%p12, %r45, %r10;
	cvt.rn.f64.u64 	%fd1, %rd81;
	cvt.rn.f64.u64 	%fd2, %rd82;
	ld.global.f64 	%fd3, [%rd9];
	mul.f64 	%fd4, %fd3, %fd2;
	setp.gtu.f64 	%p13, %fd4, %fd1;
	or.pred  	%p14, %p12, %p13;
	@%p14 bra 	$L__BB0_14;
	ld.global.u32 	%r46, [%rd8+8];
	setp.ne.s32 	%p15, %r46, 0;
	selp.u16 	%rs11, 1, 0, %p15;
$L__BB0_14:
	cvt.u32.u16 	%r88, %rs11;
	st.global.u32 	[%rd5+8], %r88;
	setp.eq.s16 	%p16, %rs11, 0;
	@%p16 bra 	$L__BB0_16;
	ld.global.u64 	%rd83, [%rd7];
	add.s64 	%rd136, %rd83, -1;
	bra.uni 	$L__BB0_17;
$L__BB0_16:
	mov.u64 	%rd136, 0;
$L__BB0_17:
	cvta.to.global.u64 	%rd85, %rd68;
	shl.b64 	%rd86, %rd6, 3;
	add.s64 	%rd87, %rd85, %rd86;
	st.global.u64 	[%rd87], %rd136;
	mov.f32 	%f6, 0f40000000;
	@%p16 bra 	$L__BB0_20;
	ld.global.u32 	%r47, [%rd5];
	setp.gt.s32 	%p18, %r47, -1;
	@%p18 bra 	$L__BB0_20;
	cvta.to.global.u64 	%rd88, %rd64;
	shl.b64 	%rd89, %rd6, 2;
	add.s64 	%rd90, %rd88, %rd89;
	ld.global.f32 	%f6, [%rd90];
$L__BB0_20:
	cvta.to.global.u64 	%rd91, %rd69;
	shl.b64 	%rd92, %rd6, 2;
	add.s64 	%rd93, %rd91, %rd92;
	st.global.f32 	[%rd93], %f6;
	@%p16 bra 	$L__BB0_24;
	ld.global.u64 	%rd12, [%rd7];
	bra.uni 	$L__BB0_22;
$L__BB0_23:
	shl.b32 	%r88, %r88, 1;
$L__BB0_22:
	cvt.u64.u32 	%rd94, %r88;
	setp.le.u64 	%p20, %rd12, %rd94;
	@%p20 bra 	$L__BB0_24;
	bra.uni 	$L__BB0_23;
$L__BB0_24:
	mov.u32 	%r48, _ZZ11tide_decideE7longest;
	atom.shared.max.u32 	%r49, [%r48], %r88;
$L__BB0_25:
	bar.sync 	0;
	ld.shared.u32 	%r16, [_ZZ11tide_decideE7longest];
	setp.eq.s32 	%p21, %r16, 0;
	or.pred  	%p23, %p1, %p21;
	@%p23 bra 	$L__BB0_27;
	clz.b32 	%r50, %r16;
	mov.u32 	%r51, 31;
	sub.s32 	%r52, %r51, %r50;
	{ // callseq 0, 0
	.reg .b32 temp_param_reg;
	.param .b64 param0;
	st.param.b64 	[param0+0], %rd71;
	.param .b32 param1;
	st.param.b32 	[param1+0], %r52;
	call.uni 
	cudaGraphSetConditional, 
	(
	param0, 
	param1
	);
	} // callseq 0
$L__BB0_27:
	setp.ge.s32 	%p24, %r91, %r36;
	@%p24 bra 	$L__BB0_53;
	mov.u32 	%r18, %ntid.x;
	not.b32 	%r53, %r91;
	add.s32 	%r54, %r36, %r53;
	div.u32 	%r19, %r54, %r18;
	add.s32 	%r55, %r19, 1;
	and.b32  	%r90, %r55, 3;
	setp.eq.s32 	%p25, %r90, 0;
	@%p25 bra 	$L__BB0_34;
	mul.wide.s32 	%rd95, %r91, 8;
	add.s64 	%rd138, %rd4, %rd95;
	mul.wide.s32 	%rd14, %r18, 8;
	mul.wide.s32 	%rd96, %r91, 24;
	add.s64 	%rd137, %rd2, %rd96;
	mul.wide.s32 	%rd16, %r18, 24;
	add.s64 	%rd17, %rd9, 8;
$L__BB0_30:
	.pragma "nounroll";
	cvt.s64.s32 	%rd20, %r91;
	ld.global.u64 	%rd21, [%rd137+16];
	mul.lo.s64 	%rd97, %rd21, 12;
	add.s64 	%rd22, %rd3, %rd97;
	ld.global.u32 	%r56, [%rd22];
	setp.lt.s32 	%p26, %r56, 0;
	@%p26 bra 	$L__BB0_32;
	ld.global.u32 	%r57, [%rd17+4];
	setp.ne.s32 	%p27, %r57, 0;
	shl.b64 	%rd98, %rd21, 4;
	add.s64 	%rd99, %rd1, %rd98;
	ld.global.u32 	%r58, [%rd99+12];
	setp.eq.s32 	%p28, %r58, 0;
	ld.global.u32 	%r59, [%rd22+4];
	setp.ne.s32 	%p29, %r59, %r34;
	or.pred  	%p30, %p27, %p28;
	or.pred  	%p31, %p30, %p29;
	mov.u64 	%rd139, %rd137;
	@%p31 bra 	$L__BB0_33;
$L__BB0_32:
	mul.lo.s64 	%rd100, %rd20, 24;
	add.s64 	%rd101, %rd2, %rd100;
	add.s64 	%rd139, %rd101, 8;
$L__BB0_33:
	ld.global.u64 	%rd102, [%rd139];
	st.global.u64 	[%rd138], %rd102;
	cvt.u32.u64 	%r60, %rd20;
	add.s32 	%r91, %r60, %r18;
	add.s64 	%rd138, %rd138, %rd14;
	add.s64 	%rd137, %rd137, %rd16;
	add.s32 	%r90, %r90, -1;
	setp.ne.s32 	%p32, %r90, 0;
	@%p32 bra 	$L__BB0_30;
$L__BB0_34:
	setp.lt.u32 	%p33, %r19, 3;
	@%p33 bra 	$L__BB0_53;
	mul.wide.s32 	%rd28, %r18, 8;
	mul.wide.s32 	%rd29, %r18, 24;
	add.s64 	%rd30, %rd9, 8;
$L__BB0_36:
	cvt.s64.s32 	%rd31, %r91;
	mul.wide.s32 	%rd103, %r91, 24;
	add.s64 	%rd104, %rd2, %rd103;
	add.s64 	%rd32, %rd104, 16;
	ld.global.u64 	%rd33, [%rd104+16];
	mul.lo.s64 	%rd105, %rd33, 12;
	add.s64 	%rd34, %rd3, %rd105;
	ld.global.u32 	%r61, [%rd34];
	setp.lt.s32 	%p34, %r61, 0;
	@%p34 bra 	$L__BB0_38;
	ld.global.u32 	%r62, [%rd30+4];
	setp.ne.s32 	%p35, %r62, 0;
	shl.b64 	%rd106, %rd33, 4;
	add.s64 	%rd107, %rd1, %rd106;
	ld.global.u32 	%r63, [%rd107+12];
	setp.eq.s32 	%p36, %r63, 0;
	ld.global.u32 	%r64, [%rd34+4];
	setp.ne.s32 	%p37, %r64, %r34;
	or.pred  	%p38, %p35, %p36;
	or.pred  	%p39, %p38, %p37;
	@%p39 bra 	$L__BB0_39;
	bra.uni 	$L__BB0_38;
$L__BB0_39:
	mul.lo.s64 	%rd110, %rd31, 24;
	add.s64 	%rd140, %rd2, %rd110;
	bra.uni 	$L__BB0_40;
$L__BB0_38:
	mul.lo.s64 	%rd108, %rd31, 24;
	add.s64 	%rd109, %rd2, %rd108;
	add.s64 	%rd140, %rd109, 8;
$L__BB0_40:
	ld.global.u64 	%rd111, [%rd140];
	shl.b64 	%rd112, %rd31, 3;
	add.s64 	%rd38, %rd4, %rd112;
	st.global.u64 	[%rd38], %rd111;
	cvt.u32.u64 	%r65, %rd31;
	add.s32 	%r66, %r65, %r18;
	cvt.s64.s32 	%rd39, %r66;
	add.s64 	%rd40, %rd32, %rd29;
	ld.global.u64 	%rd41, [%rd40];
	mul.lo.s64 	%rd113, %rd41, 12;
	add.s64 	%rd42, %rd3, %rd113;
	ld.global.u32 	%r67, [%rd42];
	setp.lt.s32 	%p40, %r67, 0;
	@%p40 bra 	$L__BB0_42;
	ld.global.u32 	%r68, [%rd30+4];
	setp.ne.s32 	%p41, %r68, 0;
	shl.b64 	%rd114, %rd41, 4;
	add.s64 	%rd115, %rd1, %rd114;
	ld.global.u32 	%r69, [%rd115+12];
	setp.eq.s32 	%p42, %r69, 0;
	ld.global.u32 	%r70, [%rd42+4];
	setp.ne.s32 	%p43, %r70, %r34;
	or.pred  	%p44, %p41, %p42;
	or.pred  	%p45, %p44, %p43;
	@%p45 bra 	$L__BB0_43;
	bra.uni 	$L__BB0_42;
$L__BB0_43:
	mul.lo.s64 	%rd118, %rd39, 24;
	add.s64 	%rd141, %rd2, %rd118;
	bra.uni 	$L__BB0_44;
$L__BB0_42:
	mul.lo.s64 	%rd116, %rd39, 24;
	add.s64 	%rd117, %rd2, %rd116;
	add.s64 	%rd141, %rd117, 8;
$L__BB0_44:
	ld.global.u64 	%rd119, [%rd141];
	add.s64 	%rd46, %rd38, %rd28;
	st.global.u64 	[%rd46], %rd119;
	cvt.u32.u64 	%r71, %rd39;
	add.s32 	%r72, %r71, %r18;
	cvt.s64.s32 	%rd47, %r72;
	add.s64 	%rd48, %rd40, %rd29;
	ld.global.u64 	%rd49, [%rd48];
	mul.lo.s64 	%rd120, %rd49, 12;
	add.s64 	%rd50, %rd3, %rd120;
	ld.global.u32 	%r73, [%rd50];
	setp.lt.s32 	%p46, %r73, 0;
	@%p46 bra 	$L__BB0_46;
	ld.global.u32 	%r74, [%rd30+4];
	setp.ne.s32 	%p47, %r74, 0;
	shl.b64 	%rd121, %rd49, 4;
	add.s64 	%rd122, %rd1, %rd121;
	ld.global.u32 	%r75, [%rd122+12];
	setp.eq.s32 	%p48, %r75, 0;
	ld.global.u32 	%r76, [%rd50+4];
	setp.ne.s32 	%p49, %r76, %r34;
	or.pred  	%p50, %p47, %p48;
	or.pred  	%p51, %p50, %p49;
	@%p51 bra 	$L__BB0_47;
	bra.uni 	$L__BB0_46;
$L__BB0_47:
	mul.lo.s64 	%rd125, %rd47, 24;
	add.s64 	%rd142, %rd2, %rd125;
	bra.uni 	$L__BB0_48;
$L__BB0_46:
	mul.lo.s64 	%rd123, %rd47, 24;
	add.s64 	%rd124, %rd2, %rd123;
	add.s64 	%rd142, %rd124, 8;
$L__BB0_48:
	ld.global.u64 	%rd126, [%rd142];
	add.s64 	%rd54, %rd46, %rd28;
	st.global.u64 	[%rd54], %rd126;
	cvt.u32.u64 	%r77, %rd47;
	add.s32 	%r78, %r77, %r18;
	cvt.s64.s32 	%rd55, %r78;
	add.s64 	%rd127, %rd48, %rd29;
	ld.global.u64 	%rd56, [%rd127];
	mul.lo.s64 	%rd128, %rd56, 12;
	add.s64 	%rd57, %rd3, %rd128;
	ld.global.u32 	%r79, [%rd57];
	setp.lt.s32 	%p52, %r79, 0;
	@%p52 bra 	$L__BB0_50;
	ld.global.u32 	%r80, [%rd30+4];
	setp.ne.s32 	%p53, %r80, 0;
	shl.b64 	%rd129, %rd56, 4;
	add.s64 	%rd130, %rd1, %rd129;
	ld.global.u32 	%r81, [%rd130+12];
	setp.eq.s32 	%p54, %r81, 0;
	ld.global.u32 	%r82, [%rd57+4];
	setp.ne.s32 	%p55, %r82, %r34;
	or.pred  	%p56, %p53, %p54;
	or.pred  	%p57, %p56, %p55;
	@%p57 bra 	$L__BB0_51;
	bra.uni 	$L__BB0_50;
$L__BB0_51:
	mul.lo.s64 	%rd133, %rd55, 24;
	add.s64 	%rd143, %rd2, %rd133;
	bra.uni 	$L__BB0_52;
$L__BB0_50:
	mul.lo.s64 	%rd131, %rd55, 24;
	add.s64 	%rd132, %rd2, %rd131;
	add.s64 	%rd143, %rd132, 8;
$L__BB0_52:
	ld.global.u64 	%rd134, [%rd143];
	add.s64 	%rd135, %rd54, %rd28;
	st.global.u64 	[%rd135], %rd134;
	cvt.u32.u64 	%r83, %rd55;
	add.s32 	%r91, %r83, %r18;
	setp.lt.s32 	%p58, %r91, %r36;
	@%p58 bra 	$L__BB0_36;
$L__BB0_53:
	ret;
}
)";

}  // namespace tide
