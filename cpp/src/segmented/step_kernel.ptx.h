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
	.param .align 8 .b8 tide_decide_param_0[104],
	.param .u32 tide_decide_param_1,
	.param .u64 tide_decide_param_2
)
{
	.reg .pred 	%p<52>;
	.reg .b16 	%rs<12>;
	.reg .f32 	%f<18>;
	.reg .b32 	%r<89>;
	.reg .f64 	%fd<5>;
	.reg .b64 	%rd<146>;
	.shared .align 4 .u32 _ZZ11tide_decideE7longest;
	ld.param.v2.u32 	{%r34, %r35}, [tide_decide_param_0+88];
	ld.param.v2.u32 	{%r36, %r37}, [tide_decide_param_0+96];
	ld.param.u32 	%r33, [tide_decide_param_1];
	ld.param.u64 	%rd71, [tide_decide_param_2];
	ld.param.u64 	%rd70, [tide_decide_param_0+80];
	ld.param.u64 	%rd69, [tide_decide_param_0+72];
	ld.param.u64 	%rd68, [tide_decide_param_0+64];
	ld.param.u64 	%rd67, [tide_decide_param_0+56];
	ld.param.u64 	%rd66, [tide_decide_param_0+48];
	ld.param.u64 	%rd65, [tide_decide_param_0+40];
	ld.param.u64 	%rd64, [tide_decide_param_0+32];
	ld.param.u64 	%rd63, [tide_decide_param_0+24];
	ld.param.u64 	%rd62, [tide_decide_param_0+16];
	ld.param.u64 	%rd61, [tide_decide_param_0+8];
	ld.param.u64 	%rd60, [tide_decide_param_0];
	cvta.to.global.u64 	%rd1, %rd61;
	cvta.to.global.u64 	%rd2, %rd66;
	cvta.to.global.u64 	%rd3, %rd67;
	cvta.to.global.u64 	%rd4, %rd70;
	mov.u32 	%r87, %tid.x;
	setp.ne.s32 	%p1, %r87, 0;
	@%p1 bra 	$L__BB0_2;
	mov.u32 	%r38, 0;
	st.shared.u32 	[_ZZ11tide_decideE7longest], %r38;
$L__BB0_2:
	setp.ge.s32 	%p2, %r87, %r34;
	mul.wide.s32 	%rd72, %r87, 16;
	add.s64 	%rd5, %rd3, %rd72;
	cvta.to.global.u64 	%rd6, %rd60;
	mad.lo.s32 	%r40, %r36, %r33, %r87;
	cvt.s64.s32 	%rd7, %r40;
	cvta.to.global.u64 	%rd73, %rd62;
	mul.wide.s32 	%rd74, %r40, 8;
	add.s64 	%rd8, %rd73, %rd74;
	add.s64 	%rd9, %rd1, %rd72;
	mov.u16 	%rs11, 0;
	mov.u32 	%r82, 0;
	@%p2 bra 	$L__BB0_11;
	ld.global.u32 	%r41, [%rd5+8];
	setp.ne.s32 	%p3, %r41, 0;
	selp.u32 	%r82, 1, 0, %p3;
	setp.eq.s32 	%p4, %r41, 0;
	@%p4 bra 	$L__BB0_11;
	st.global.u32 	[%rd5+4], %r33;
	setp.eq.s32 	%p5, %r35, %r33;
	@%p5 bra 	$L__BB0_11;
	add.s32 	%r6, %r33, -1;
	mad.lo.s32 	%r7, %r6, %r36, %r87;
	ld.global.u32 	%r81, [%rd5];
	setp.gt.s32 	%p6, %r81, -1;
	@%p6 bra 	$L__BB0_8;
	cvta.to.global.u64 	%rd75, %rd65;
	mul.wide.s32 	%rd76, %r7, 4;
	add.s64 	%rd77, %rd75, %rd76;
	ld.global.u32 	%r42, [%rd77];
	setp.eq.s32 	%p7, %r42, 0;
	@%p7 bra 	$L__BB0_8;
	add.s32 	%r80, %r33, -1;
	st.global.u32 	[%rd5], %r80;
	mov.u32 	%r81, %r6;
$L__BB0_8:
	ld.global.u32 	%r43, [%rd6+12];
	setp.eq.s32 	%p8, %r43, 0;
	@%p8 bra 	$L__BB0_10;
	cvta.to.global.u64 	%rd78, %rd64;
	mul.wide.s32 	%rd79, %r7, 4;
	add.s64 	%rd80, %rd78, %rd79;
	ld.global.f32 	%f7, [%rd5+12];
	mov.f32 	%f8, 0f3F800000;
	sub.f32 	%f9, %f8, %f7;
	ld.global.f32 	%f10, [%rd80];
	fma.rn.f32 	%f11, %f9, %f10, %f7;
	st.global.f32 	[%rd5+12], %f11;
$L__BB0_10:
	ld.global.u64 	%rd81, [%rd8];
	ld.global.u64 	%rd82, [%rd9];
	setp.gt.s64 	%p9, %rd81, %rd82;
	selp.u16 	%rs8, 1, 0, %p9;
	shr.u32 	%r44, %r81, 31;
	cvt.u16.u32 	%rs9, %r44;
	or.b16  	%rs11, %rs8, %rs9;
$L__BB0_11:
	{ 
	.reg .pred 	%p1; 
	setp.ne.u32 	%p1, %r82, 0; 
	bar.red.popc.u32 	%r11, 0, %p1; 
	}
	cvt.u32.u16 	%r45, %rs11;
	{ 
	.reg .pred 	%p1; 
	setp.ne.u32 	%p1, %r45, 0; 
	bar.red.popc.u32 	%r12, 0, %p1; 
	}
	setp.le.s32 	%p10, %r35, %r33;
	@%p10 bra 	$L__BB0_31;
	@%p2 bra 	$L__BB0_29;
	setp.lt.s32 	%p12, %r12, 1;
	@%p12 bra 	$L__BB0_16;
	cvt.s64.s32 	%rd83, %r12;
	ld.global.u32 	%r46, [%rd6+8];
	cvt.s64.s32 	%rd84, %r46;
	setp.ne.s32 	%p13, %r46, %r11;
	cvt.rn.f64.u64 	%fd1, %rd83;
	cvt.rn.f64.u64 	%fd2, %rd84;
	ld.global.f64 	%fd3, [%rd6];
	mul.f64 	%fd4, %fd3, %fd2;
	setp.gtu.f64 	%p14, %fd4, %fd1;
	or.pred  	%p15, %p13, %p14;
	@%p15 bra 	$L__BB0_16;
	ld.global.u32 	%r47, [%rd9+8];
	setp.ne.s32 	%p16, %r47, 0;
	selp.u16 	%rs11, 1, 0, %p16;
$L__BB0_16:
	cvt.u32.u16 	%r84, %rs11;
	st.global.u32 	[%rd5+8], %r84;
	setp.eq.s16 	%p17, %rs11, 0;
	@%p17 bra 	$L__BB0_18;
	ld.global.u64 	%rd85, [%rd8];
	add.s64 	%rd138, %rd85, -1;
	bra.uni 	$L__BB0_19;
$L__BB0_18:
	mov.u64 	%rd138, 0;
$L__BB0_19:
	cvta.to.global.u64 	%rd87, %rd68;
	shl.b64 	%rd88, %rd7, 3;
	add.s64 	%rd89, %rd87, %rd88;
	st.global.u64 	[%rd89], %rd138;
	mov.f32 	%f17, 0f40000000;
	@%p17 bra 	$L__BB0_24;
	ld.global.u32 	%r48, [%rd5];
	setp.gt.s32 	%p19, %r48, -1;
	@%p19 bra 	$L__BB0_24;
	cvta.to.global.u64 	%rd90, %rd63;
	shl.b64 	%rd91, %rd7, 2;
	add.s64 	%rd92, %rd90, %rd91;
	ld.global.f32 	%f1, [%rd92];
	ld.global.f32 	%f2, [%rd5+12];
	mov.f32 	%f14, 0f3F800000;
	sub.f32 	%f3, %f14, %f2;
	setp.gt.f32 	%p20, %f3, 0f00000000;
	@%p20 bra 	$L__BB0_23;
	bra.uni 	$L__BB0_22;
$L__BB0_23:
	sub.f32 	%f15, %f1, %f2;
	div.rn.f32 	%f17, %f15, %f3;
	bra.uni 	$L__BB0_24;
$L__BB0_22:
	setp.gt.f32 	%p21, %f2, %f1;
	selp.f32 	%f17, 0fBF800000, 0f40000000, %p21;
$L__BB0_24:
	cvta.to.global.u64 	%rd93, %rd69;
	shl.b64 	%rd94, %rd7, 2;
	add.s64 	%rd95, %rd93, %rd94;
	st.global.f32 	[%rd95], %f17;
	@%p17 bra 	$L__BB0_28;
	ld.global.u64 	%rd12, [%rd8];
	bra.uni 	$L__BB0_26;
$L__BB0_27:
	shl.b32 	%r84, %r84, 1;
$L__BB0_26:
	cvt.u64.u32 	%rd96, %r84;
	setp.le.u64 	%p23, %rd12, %rd96;
	@%p23 bra 	$L__BB0_28;
	bra.uni 	$L__BB0_27;
$L__BB0_28:
	mov.u32 	%r49, _ZZ11tide_decideE7longest;
	atom.shared.max.u32 	%r50, [%r49], %r84;
$L__BB0_29:
	bar.sync 	0;
	ld.shared.u32 	%r17, [_ZZ11tide_decideE7longest];
	setp.eq.s32 	%p24, %r17, 0;
	or.pred  	%p26, %p1, %p24;
	@%p26 bra 	$L__BB0_31;
	clz.b32 	%r51, %r17;
	mov.u32 	%r52, 31;
	sub.s32 	%r53, %r52, %r51;
	{ // callseq 0, 0
	.reg .b32 temp_param_reg;
	.param .b64 param0;
	st.param.b64 	[param0+0], %rd71;
	.param .b32 param1;
	st.param.b32 	[param1+0], %r53;
	call.uni 
	cudaGraphSetConditional, 
	(
	param0, 
	param1
	);
	} // callseq 0
$L__BB0_31:
	setp.ge.s32 	%p27, %r87, %r37;
	@%p27 bra 	$L__BB0_57;
	mov.u32 	%r19, %ntid.x;
	not.b32 	%r54, %r87;
	add.s32 	%r55, %r37, %r54;
	div.u32 	%r20, %r55, %r19;
	add.s32 	%r56, %r20, 1;
	and.b32  	%r86, %r56, 3;
	setp.eq.s32 	%p28, %r86, 0;
	@%p28 bra 	$L__BB0_38;
	mul.wide.s32 	%rd97, %r87, 8;
	add.s64 	%rd140, %rd4, %rd97;
	mul.wide.s32 	%rd14, %r19, 8;
	mul.wide.s32 	%rd98, %r87, 24;
	add.s64 	%rd99, %rd2, %rd98;
	add.s64 	%rd139, %rd99, 8;
	mul.wide.s32 	%rd16, %r19, 24;
$L__BB0_34:
	.pragma "nounroll";
	cvt.s64.s32 	%rd19, %r87;
	ld.global.u64 	%rd21, [%rd139+8];
	shl.b64 	%rd100, %rd21, 4;
	add.s64 	%rd22, %rd3, %rd100;
	ld.global.u32 	%r57, [%rd22];
	setp.lt.s32 	%p29, %r57, 0;
	mov.u64 	%rd141, %rd139;
	@%p29 bra 	$L__BB0_37;
	add.s64 	%rd102, %rd1, %rd100;
	ld.global.u32 	%r58, [%rd102+12];
	setp.ne.s32 	%p30, %r58, 0;
	ld.global.u32 	%r59, [%rd22+4];
	setp.eq.s32 	%p31, %r59, %r35;
	and.pred  	%p32, %p30, %p31;
	mov.u64 	%rd141, %rd139;
	@%p32 bra 	$L__BB0_37;
	mul.lo.s64 	%rd103, %rd19, 24;
	add.s64 	%rd141, %rd2, %rd103;
$L__BB0_37:
	ld.global.u64 	%rd104, [%rd141];
	st.global.u64 	[%rd140], %rd104;
	cvt.u32.u64 	%r60, %rd19;
	add.s32 	%r87, %r60, %r19;
	add.s64 	%rd140, %rd140, %rd14;
	add.s64 	%rd139, %rd139, %rd16;
	add.s32 	%r86, %r86, -1;
	setp.ne.s32 	%p33, %r86, 0;
	@%p33 bra 	$L__BB0_34;
$L__BB0_38:
	setp.lt.u32 	%p34, %r20, 3;
	@%p34 bra 	$L__BB0_57;
	mul.wide.s32 	%rd28, %r19, 8;
	mul.wide.s32 	%rd29, %r19, 24;
$L__BB0_40:
	cvt.s64.s32 	%rd30, %r87;
	mul.wide.s32 	%rd105, %r87, 24;
	add.s64 	%rd106, %rd2, %rd105;
	add.s64 	%rd31, %rd106, 16;
	ld.global.u64 	%rd32, [%rd106+16];
	shl.b64 	%rd107, %rd32, 4;
	add.s64 	%rd33, %rd3, %rd107;
	ld.global.u32 	%r61, [%rd33];
	setp.lt.s32 	%p35, %r61, 0;
	@%p35 bra 	$L__BB0_43;
	add.s64 	%rd109, %rd1, %rd107;
	ld.global.u32 	%r62, [%rd109+12];
	setp.ne.s32 	%p36, %r62, 0;
	ld.global.u32 	%r63, [%rd33+4];
	setp.eq.s32 	%p37, %r63, %r35;
	and.pred  	%p38, %p36, %p37;
	@%p38 bra 	$L__BB0_43;
	bra.uni 	$L__BB0_42;
$L__BB0_43:
	mul.lo.s64 	%rd111, %rd30, 24;
	add.s64 	%rd112, %rd2, %rd111;
	add.s64 	%rd142, %rd112, 8;
	bra.uni 	$L__BB0_44;
$L__BB0_42:
	mul.lo.s64 	%rd110, %rd30, 24;
	add.s64 	%rd142, %rd2, %rd110;
$L__BB0_44:
	ld.global.u64 	%rd113, [%rd142];
	shl.b64 	%rd114, %rd30, 3;
	add.s64 	%rd37, %rd4, %rd114;
	st.global.u64 	[%rd37], %rd113;
	cvt.u32.u64 	%r64, %rd30;
	add.s32 	%r65, %r64, %r19;
	cvt.s64.s32 	%rd38, %r65;
	add.s64 	%rd39, %rd31, %rd29;
	ld.global.u64 	%rd40, [%rd39];
	shl.b64 	%rd115, %rd40, 4;
	add.s64 	%rd41, %rd3, %rd115;
	ld.global.u32 	%r66, [%rd41];
	setp.lt.s32 	%p39, %r66, 0;
	@%p39 bra 	$L__BB0_47;
	add.s64 	%rd117, %rd1, %rd115;
	ld.global.u32 	%r67, [%rd117+12];
	setp.ne.s32 	%p40, %r67, 0;
	ld.global.u32 	%r68, [%rd41+4];
	setp.eq.s32 	%p41, %r68, %r35;
	and.pred  	%p42, %p40, %p41;
	@%p42 bra 	$L__BB0_47;
	bra.uni 	$L__BB0_46;
$L__BB0_47:
	mul.lo.s64 	%rd119, %rd38, 24;
	add.s64 	%rd120, %rd2, %rd119;
	add.s64 	%rd143, %rd120, 8;
	bra.uni 	$L__BB0_48;
$L__BB0_46:
	mul.lo.s64 	%rd118, %rd38, 24;
	add.s64 	%rd143, %rd2, %rd118;
$L__BB0_48:
	ld.global.u64 	%rd121, [%rd143];
	add.s64 	%rd45, %rd37, %rd28;
	st.global.u64 	[%rd45], %rd121;
	cvt.u32.u64 	%r69, %rd38;
	add.s32 	%r70, %r69, %r19;
	cvt.s64.s32 	%rd46, %r70;
	add.s64 	%rd47, %rd39, %rd29;
	ld.global.u64 	%rd48, [%rd47];
	shl.b64 	%rd122, %rd48, 4;
	add.s64 	%rd49, %rd3, %rd122;
	ld.global.u32 	%r71, [%rd49];
	setp.lt.s32 	%p43, %r71, 0;
	@%p43 bra 	$L__BB0_51;
	add.s64 	%rd124, %rd1, %rd122;
	ld.global.u32 	%r72, [%rd124+12];
	setp.ne.s32 	%p44, %r72, 0;
	ld.global.u32 	%r73, [%rd49+4];
	setp.eq.s32 	%p45, %r73, %r35;
	and.pred  	%p46, %p44, %p45;
	@%p46 bra 	$L__BB0_51;
	bra.uni 	$L__BB0_50;
$L__BB0_51:
	mul.lo.s64 	%rd126, %rd46, 24;
	add.s64 	%rd127, %rd2, %rd126;
	add.s64 	%rd144, %rd127, 8;
	bra.uni 	$L__BB0_52;
$L__BB0_50:
	mul.lo.s64 	%rd125, %rd46, 24;
	add.s64 	%rd144, %rd2, %rd125;
$L__BB0_52:
	ld.global.u64 	%rd128, [%rd144];
	add.s64 	%rd53, %rd45, %rd28;
	st.global.u64 	[%rd53], %rd128;
	cvt.u32.u64 	%r74, %rd46;
	add.s32 	%r75, %r74, %r19;
	cvt.s64.s32 	%rd54, %r75;
	add.s64 	%rd129, %rd47, %rd29;
	ld.global.u64 	%rd55, [%rd129];
	shl.b64 	%rd130, %rd55, 4;
	add.s64 	%rd56, %rd3, %rd130;
	ld.global.u32 	%r76, [%rd56];
	setp.lt.s32 	%p47, %r76, 0;
	@%p47 bra 	$L__BB0_55;
	add.s64 	%rd132, %rd1, %rd130;
	ld.global.u32 	%r77, [%rd132+12];
	setp.ne.s32 	%p48, %r77, 0;
	ld.global.u32 	%r78, [%rd56+4];
	setp.eq.s32 	%p49, %r78, %r35;
	and.pred  	%p50, %p48, %p49;
	@%p50 bra 	$L__BB0_55;
	bra.uni 	$L__BB0_54;
$L__BB0_55:
	mul.lo.s64 	%rd134, %rd54, 24;
	add.s64 	%rd135, %rd2, %rd134;
	add.s64 	%rd145, %rd135, 8;
	bra.uni 	$L__BB0_56;
$L__BB0_54:
	mul.lo.s64 	%rd133, %rd54, 24;
	add.s64 	%rd145, %rd2, %rd133;
$L__BB0_56:
	ld.global.u64 	%rd136, [%rd145];
	add.s64 	%rd137, %rd53, %rd28;
	st.global.u64 	[%rd137], %rd136;
	cvt.u32.u64 	%r79, %rd54;
	add.s32 	%r87, %r79, %r19;
	setp.lt.s32 	%p51, %r87, %r37;
	@%p51 bra 	$L__BB0_40;
$L__BB0_57:
	ret;
}
)";

}  // namespace tide
