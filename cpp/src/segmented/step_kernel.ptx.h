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
	.reg .pred 	%p<49>;
	.reg .b16 	%rs<12>;
	.reg .f32 	%f<7>;
	.reg .b32 	%r<88>;
	.reg .f64 	%fd<5>;
	.reg .b64 	%rd<143>;
	.shared .align 4 .u32 _ZZ11tide_decideE7longest;
	ld.param.v2.u32 	{%r33, %r34}, [tide_decide_param_0+80];
	ld.param.v2.u32 	{%r35, %r36}, [tide_decide_param_0+88];
	ld.param.u32 	%r32, [tide_decide_param_1];
	ld.param.u64 	%rd69, [tide_decide_param_2];
	ld.param.u64 	%rd68, [tide_decide_param_0+72];
	ld.param.u64 	%rd67, [tide_decide_param_0+64];
	ld.param.u64 	%rd66, [tide_decide_param_0+56];
	ld.param.u64 	%rd65, [tide_decide_param_0+48];
	ld.param.u64 	%rd64, [tide_decide_param_0+40];
	ld.param.u64 	%rd63, [tide_decide_param_0+32];
	ld.param.u64 	%rd62, [tide_decide_param_0+24];
	ld.param.u64 	%rd61, [tide_decide_param_0+16];
	ld.param.u64 	%rd60, [tide_decide_param_0+8];
	ld.param.u64 	%rd59, [tide_decide_param_0];
	cvta.to.global.u64 	%rd1, %rd60;
	cvta.to.global.u64 	%rd2, %rd64;
	cvta.to.global.u64 	%rd3, %rd65;
	cvta.to.global.u64 	%rd4, %rd68;
	mov.u32 	%r86, %tid.x;
	setp.ne.s32 	%p1, %r86, 0;
	@%p1 bra 	$L__BB0_2;
	mov.u32 	%r37, 0;
	st.shared.u32 	[_ZZ11tide_decideE7longest], %r37;
$L__BB0_2:
	setp.ge.s32 	%p2, %r86, %r33;
	mul.wide.s32 	%rd70, %r86, 12;
	add.s64 	%rd5, %rd3, %rd70;
	mad.lo.s32 	%r39, %r35, %r32, %r86;
	cvt.s64.s32 	%rd6, %r39;
	cvta.to.global.u64 	%rd71, %rd61;
	mul.wide.s32 	%rd72, %r39, 8;
	add.s64 	%rd7, %rd71, %rd72;
	mul.wide.s32 	%rd73, %r86, 16;
	add.s64 	%rd8, %rd1, %rd73;
	mov.u16 	%rs11, 0;
	mov.u32 	%r81, 0;
	@%p2 bra 	$L__BB0_9;
	ld.global.u32 	%r40, [%rd5+8];
	setp.ne.s32 	%p3, %r40, 0;
	selp.u32 	%r81, 1, 0, %p3;
	setp.eq.s32 	%p4, %r40, 0;
	@%p4 bra 	$L__BB0_9;
	st.global.u32 	[%rd5+4], %r32;
	setp.eq.s32 	%p5, %r34, %r32;
	@%p5 bra 	$L__BB0_9;
	ld.global.u32 	%r80, [%rd5];
	setp.gt.s32 	%p6, %r80, -1;
	@%p6 bra 	$L__BB0_8;
	add.s32 	%r7, %r32, -1;
	mad.lo.s32 	%r41, %r7, %r35, %r86;
	cvta.to.global.u64 	%rd74, %rd63;
	mul.wide.s32 	%rd75, %r41, 4;
	add.s64 	%rd76, %rd74, %rd75;
	ld.global.u32 	%r42, [%rd76];
	setp.eq.s32 	%p7, %r42, 0;
	@%p7 bra 	$L__BB0_8;
	add.s32 	%r79, %r32, -1;
	st.global.u32 	[%rd5], %r79;
	mov.u32 	%r80, %r7;
$L__BB0_8:
	ld.global.u64 	%rd77, [%rd8];
	ld.global.u64 	%rd78, [%rd7];
	setp.gt.s64 	%p8, %rd78, %rd77;
	selp.u16 	%rs8, 1, 0, %p8;
	shr.u32 	%r43, %r80, 31;
	cvt.u16.u32 	%rs9, %r43;
	or.b16  	%rs11, %rs8, %rs9;
$L__BB0_9:
	{ 
	.reg .pred 	%p1; 
	setp.ne.u32 	%p1, %r81, 0; 
	bar.red.popc.u32 	%r10, 0, %p1; 
	}
	cvt.u32.u16 	%r44, %rs11;
	{ 
	.reg .pred 	%p1; 
	setp.ne.u32 	%p1, %r44, 0; 
	bar.red.popc.u32 	%r11, 0, %p1; 
	}
	setp.le.s32 	%p9, %r34, %r32;
	@%p9 bra 	$L__BB0_27;
	@%p2 bra 	$L__BB0_25;
	setp.lt.s32 	%p11, %r11, 1;
	@%p11 bra 	$L__BB0_14;
	cvt.s64.s32 	%rd79, %r11;
	cvta.to.global.u64 	%rd80, %rd59;
	ld.global.u32 	%r45, [%rd80+8];
	cvt.s64.s32 	%rd81, %r45;
	setp.ne.s32 	%p12, %r45, %r10;
	cvt.rn.f64.u64 	%fd1, %rd79;
	cvt.rn.f64.u64 	%fd2, %rd81;
	ld.global.f64 	%fd3, [%rd80];
	mul.f64 	%fd4, %fd3, %fd2;
	setp.gtu.f64 	%p13, %fd4, %fd1;
	or.pred  	%p14, %p12, %p13;
	@%p14 bra 	$L__BB0_14;
	ld.global.u32 	%r46, [%rd8+8];
	setp.ne.s32 	%p15, %r46, 0;
	selp.u16 	%rs11, 1, 0, %p15;
$L__BB0_14:
	cvt.u32.u16 	%r83, %rs11;
	st.global.u32 	[%rd5+8], %r83;
	setp.eq.s16 	%p16, %rs11, 0;
	@%p16 bra 	$L__BB0_16;
	ld.global.u64 	%rd82, [%rd7];
	add.s64 	%rd135, %rd82, -1;
	bra.uni 	$L__BB0_17;
$L__BB0_16:
	mov.u64 	%rd135, 0;
$L__BB0_17:
	cvta.to.global.u64 	%rd84, %rd66;
	shl.b64 	%rd85, %rd6, 3;
	add.s64 	%rd86, %rd84, %rd85;
	st.global.u64 	[%rd86], %rd135;
	mov.f32 	%f6, 0f40000000;
	@%p16 bra 	$L__BB0_20;
	ld.global.u32 	%r47, [%rd5];
	setp.gt.s32 	%p18, %r47, -1;
	@%p18 bra 	$L__BB0_20;
	cvta.to.global.u64 	%rd87, %rd62;
	shl.b64 	%rd88, %rd6, 2;
	add.s64 	%rd89, %rd87, %rd88;
	ld.global.f32 	%f6, [%rd89];
$L__BB0_20:
	cvta.to.global.u64 	%rd90, %rd67;
	shl.b64 	%rd91, %rd6, 2;
	add.s64 	%rd92, %rd90, %rd91;
	st.global.f32 	[%rd92], %f6;
	@%p16 bra 	$L__BB0_24;
	ld.global.u64 	%rd11, [%rd7];
	bra.uni 	$L__BB0_22;
$L__BB0_23:
	shl.b32 	%r83, %r83, 1;
$L__BB0_22:
	cvt.u64.u32 	%rd93, %r83;
	setp.le.u64 	%p20, %rd11, %rd93;
	@%p20 bra 	$L__BB0_24;
	bra.uni 	$L__BB0_23;
$L__BB0_24:
	mov.u32 	%r48, _ZZ11tide_decideE7longest;
	atom.shared.max.u32 	%r49, [%r48], %r83;
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
	st.param.b64 	[param0+0], %rd69;
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
	setp.ge.s32 	%p24, %r86, %r36;
	@%p24 bra 	$L__BB0_53;
	mov.u32 	%r18, %ntid.x;
	not.b32 	%r53, %r86;
	add.s32 	%r54, %r36, %r53;
	div.u32 	%r19, %r54, %r18;
	add.s32 	%r55, %r19, 1;
	and.b32  	%r85, %r55, 3;
	setp.eq.s32 	%p25, %r85, 0;
	@%p25 bra 	$L__BB0_34;
	mul.wide.s32 	%rd94, %r86, 8;
	add.s64 	%rd137, %rd4, %rd94;
	mul.wide.s32 	%rd13, %r18, 8;
	mul.wide.s32 	%rd95, %r86, 24;
	add.s64 	%rd96, %rd2, %rd95;
	add.s64 	%rd136, %rd96, 8;
	mul.wide.s32 	%rd15, %r18, 24;
$L__BB0_30:
	.pragma "nounroll";
	cvt.s64.s32 	%rd18, %r86;
	ld.global.u64 	%rd20, [%rd136+8];
	mul.lo.s64 	%rd97, %rd20, 12;
	add.s64 	%rd21, %rd3, %rd97;
	ld.global.u32 	%r56, [%rd21];
	setp.lt.s32 	%p26, %r56, 0;
	mov.u64 	%rd138, %rd136;
	@%p26 bra 	$L__BB0_33;
	shl.b64 	%rd98, %rd20, 4;
	add.s64 	%rd99, %rd1, %rd98;
	ld.global.u32 	%r57, [%rd99+12];
	setp.ne.s32 	%p27, %r57, 0;
	ld.global.u32 	%r58, [%rd21+4];
	setp.eq.s32 	%p28, %r58, %r34;
	and.pred  	%p29, %p27, %p28;
	mov.u64 	%rd138, %rd136;
	@%p29 bra 	$L__BB0_33;
	mul.lo.s64 	%rd100, %rd18, 24;
	add.s64 	%rd138, %rd2, %rd100;
$L__BB0_33:
	ld.global.u64 	%rd101, [%rd138];
	st.global.u64 	[%rd137], %rd101;
	cvt.u32.u64 	%r59, %rd18;
	add.s32 	%r86, %r59, %r18;
	add.s64 	%rd137, %rd137, %rd13;
	add.s64 	%rd136, %rd136, %rd15;
	add.s32 	%r85, %r85, -1;
	setp.ne.s32 	%p30, %r85, 0;
	@%p30 bra 	$L__BB0_30;
$L__BB0_34:
	setp.lt.u32 	%p31, %r19, 3;
	@%p31 bra 	$L__BB0_53;
	mul.wide.s32 	%rd27, %r18, 8;
	mul.wide.s32 	%rd28, %r18, 24;
$L__BB0_36:
	cvt.s64.s32 	%rd29, %r86;
	mul.wide.s32 	%rd102, %r86, 24;
	add.s64 	%rd103, %rd2, %rd102;
	add.s64 	%rd30, %rd103, 16;
	ld.global.u64 	%rd31, [%rd103+16];
	mul.lo.s64 	%rd104, %rd31, 12;
	add.s64 	%rd32, %rd3, %rd104;
	ld.global.u32 	%r60, [%rd32];
	setp.lt.s32 	%p32, %r60, 0;
	@%p32 bra 	$L__BB0_39;
	shl.b64 	%rd105, %rd31, 4;
	add.s64 	%rd106, %rd1, %rd105;
	ld.global.u32 	%r61, [%rd106+12];
	setp.ne.s32 	%p33, %r61, 0;
	ld.global.u32 	%r62, [%rd32+4];
	setp.eq.s32 	%p34, %r62, %r34;
	and.pred  	%p35, %p33, %p34;
	@%p35 bra 	$L__BB0_39;
	bra.uni 	$L__BB0_38;
$L__BB0_39:
	mul.lo.s64 	%rd108, %rd29, 24;
	add.s64 	%rd109, %rd2, %rd108;
	add.s64 	%rd139, %rd109, 8;
	bra.uni 	$L__BB0_40;
$L__BB0_38:
	mul.lo.s64 	%rd107, %rd29, 24;
	add.s64 	%rd139, %rd2, %rd107;
$L__BB0_40:
	ld.global.u64 	%rd110, [%rd139];
	shl.b64 	%rd111, %rd29, 3;
	add.s64 	%rd36, %rd4, %rd111;
	st.global.u64 	[%rd36], %rd110;
	cvt.u32.u64 	%r63, %rd29;
	add.s32 	%r64, %r63, %r18;
	cvt.s64.s32 	%rd37, %r64;
	add.s64 	%rd38, %rd30, %rd28;
	ld.global.u64 	%rd39, [%rd38];
	mul.lo.s64 	%rd112, %rd39, 12;
	add.s64 	%rd40, %rd3, %rd112;
	ld.global.u32 	%r65, [%rd40];
	setp.lt.s32 	%p36, %r65, 0;
	@%p36 bra 	$L__BB0_43;
	shl.b64 	%rd113, %rd39, 4;
	add.s64 	%rd114, %rd1, %rd113;
	ld.global.u32 	%r66, [%rd114+12];
	setp.ne.s32 	%p37, %r66, 0;
	ld.global.u32 	%r67, [%rd40+4];
	setp.eq.s32 	%p38, %r67, %r34;
	and.pred  	%p39, %p37, %p38;
	@%p39 bra 	$L__BB0_43;
	bra.uni 	$L__BB0_42;
$L__BB0_43:
	mul.lo.s64 	%rd116, %rd37, 24;
	add.s64 	%rd117, %rd2, %rd116;
	add.s64 	%rd140, %rd117, 8;
	bra.uni 	$L__BB0_44;
$L__BB0_42:
	mul.lo.s64 	%rd115, %rd37, 24;
	add.s64 	%rd140, %rd2, %rd115;
$L__BB0_44:
	ld.global.u64 	%rd118, [%rd140];
	add.s64 	%rd44, %rd36, %rd27;
	st.global.u64 	[%rd44], %rd118;
	cvt.u32.u64 	%r68, %rd37;
	add.s32 	%r69, %r68, %r18;
	cvt.s64.s32 	%rd45, %r69;
	add.s64 	%rd46, %rd38, %rd28;
	ld.global.u64 	%rd47, [%rd46];
	mul.lo.s64 	%rd119, %rd47, 12;
	add.s64 	%rd48, %rd3, %rd119;
	ld.global.u32 	%r70, [%rd48];
	setp.lt.s32 	%p40, %r70, 0;
	@%p40 bra 	$L__BB0_47;
	shl.b64 	%rd120, %rd47, 4;
	add.s64 	%rd121, %rd1, %rd120;
	ld.global.u32 	%r71, [%rd121+12];
	setp.ne.s32 	%p41, %r71, 0;
	ld.global.u32 	%r72, [%rd48+4];
	setp.eq.s32 	%p42, %r72, %r34;
	and.pred  	%p43, %p41, %p42;
	@%p43 bra 	$L__BB0_47;
	bra.uni 	$L__BB0_46;
$L__BB0_47:
	mul.lo.s64 	%rd123, %rd45, 24;
	add.s64 	%rd124, %rd2, %rd123;
	add.s64 	%rd141, %rd124, 8;
	bra.uni 	$L__BB0_48;
$L__BB0_46:
	mul.lo.s64 	%rd122, %rd45, 24;
	add.s64 	%rd141, %rd2, %rd122;
$L__BB0_48:
	ld.global.u64 	%rd125, [%rd141];
	add.s64 	%rd52, %rd44, %rd27;
	st.global.u64 	[%rd52], %rd125;
	cvt.u32.u64 	%r73, %rd45;
	add.s32 	%r74, %r73, %r18;
	cvt.s64.s32 	%rd53, %r74;
	add.s64 	%rd126, %rd46, %rd28;
	ld.global.u64 	%rd54, [%rd126];
	mul.lo.s64 	%rd127, %rd54, 12;
	add.s64 	%rd55, %rd3, %rd127;
	ld.global.u32 	%r75, [%rd55];
	setp.lt.s32 	%p44, %r75, 0;
	@%p44 bra 	$L__BB0_51;
	shl.b64 	%rd128, %rd54, 4;
	add.s64 	%rd129, %rd1, %rd128;
	ld.global.u32 	%r76, [%rd129+12];
	setp.ne.s32 	%p45, %r76, 0;
	ld.global.u32 	%r77, [%rd55+4];
	setp.eq.s32 	%p46, %r77, %r34;
	and.pred  	%p47, %p45, %p46;
	@%p47 bra 	$L__BB0_51;
	bra.uni 	$L__BB0_50;
$L__BB0_51:
	mul.lo.s64 	%rd131, %rd53, 24;
	add.s64 	%rd132, %rd2, %rd131;
	add.s64 	%rd142, %rd132, 8;
	bra.uni 	$L__BB0_52;
$L__BB0_50:
	mul.lo.s64 	%rd130, %rd53, 24;
	add.s64 	%rd142, %rd2, %rd130;
$L__BB0_52:
	ld.global.u64 	%rd133, [%rd142];
	add.s64 	%rd134, %rd52, %rd27;
	st.global.u64 	[%rd134], %rd133;
	cvt.u32.u64 	%r78, %rd53;
	add.s32 	%r86, %r78, %r18;
	setp.lt.s32 	%p48, %r86, %r36;
	@%p48 bra 	$L__BB0_36;
$L__BB0_53:
	ret;
}
)";

}  // namespace tide
