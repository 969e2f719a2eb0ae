# ruff: noqa: ANN001, ANN201, ANN202, RET505
# (device code: the compiler infers types, prunes branches, knows no unpacking, inlines calls)
# mypy: ignore-errors
"""Words: arithmetic on packed 32-bit words, as device functions.

Weights stay integers in their packed words; ``dp4a`` multiplies four of them with four bytes of the
activations at once, exactly. ``EMU`` selects plain Triton instead of PTX: for Triton's interpreter,
which has no PTX. Rejected: float arithmetic per weight (two to three times the instructions).
"""

import triton
import triton.language as tl


@triton.jit
def dp4a(a, b, c, UNSIGNED: tl.constexpr, EMU: tl.constexpr):
    """``c`` plus the dot product of bytes: ``a``, signed unless UNSIGNED, and signed ``b``."""
    if EMU:
        for i in tl.static_range(4):
            byte = (a >> (8 * i)) & 255 if UNSIGNED else (a << (24 - 8 * i)) >> 24
            c += byte * ((b << (24 - 8 * i)) >> 24)
        return c
    elif UNSIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def funnel(low, high, shift, EMU: tl.constexpr):
    """Low word of ``high:low >> shift``, shift 0..32: a word at any byte of two aligned ones."""
    if EMU:
        both = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(
            tl.uint32, bitcast=True
        ).to(tl.uint64)
        return (both >> shift.to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "shf.r.clamp.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [low, high, shift],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def load_pair(p):
    """Two neighbouring words in one load: of high bytes and of low bytes, or their sums."""
    both = tl.load(p.to(tl.pointer_type(tl.int64)))
    return both.to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def masked_load(p, live):
    """What ``p`` points to, zero where ``live`` is false; ``live`` None stands for everywhere."""
    if live is None:
        return tl.load(p)
    else:
        return tl.load(p, mask=live, other=0)


@triton.jit
def half(word):
    """The float16 in the low half of a word, as float32."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed_byte(word, i: tl.constexpr):
    """Byte ``i`` of a word as an integer, sign kept."""
    return (word << (24 - 8 * i)) >> 24


@triton.jit
def half_power(e):
    """``2^(e-128)``: half of an E8M0 scale, exact for every ``e`` in 0..255.

    Doubled weights carry the other factor of two. Below e = 2 the result is subnormal, whose bits
    are another line through ``e``: the larger of both lines is right everywhere.
    """
    normal = e * 0x00800000 - 0x00800000
    subnormal = e * 0x00200000 + 0x00200000
    return tl.maximum(normal, subnormal).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_bytes(n0, n1, n2, n3):
    packed = n0 * 0
    for i in tl.static_range(4):
        code = n0 if i == 0 else (n1 if i == 1 else (n2 if i == 2 else n3))
        m = code & 7
        value = tl.where(m < 4, m, tl.where(m < 6, 2 * m - 4, 4 * m - 16))
        packed = packed | ((tl.where((code & 8) != 0, -value, value) + 16) << (8 * i))
    return packed


@triton.jit
def e2m1_words(word, zero, EMU: tl.constexpr):
    """Eight E2M1 codes as two words of bytes, each byte twice its value plus 16.

    Byte order: the low then the high nibble of byte 0, of byte 1; then of bytes 2 and 3. Table
    bytes are positive, so ``prmt`` answers 0 for a code of the other sign: two look-ups and one sum
    do four codes. The sum is a multiplication by one, which keeps it off the unit that look-ups and
    shifts fill; the compiler must not know that, nor the tables' low halves, which as constants sit
    in uniform registers and are copied before every use. ``zero`` is a zero that it does not know.
    """
    if EMU:
        first = _e2m1_bytes(word & 15, (word >> 4) & 15, (word >> 8) & 15, (word >> 12) & 15)
        second = _e2m1_bytes(
            (word >> 16) & 15, (word >> 20) & 15, (word >> 24) & 15, (word >> 28) & 15
        )
        return first, second
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 w, x, p, q, r;
            xor.b32 x, $2, 0x88888888;
            prmt.b32 p, $3, 0x1C181614, $2;
            prmt.b32 q, $4, 0x04080A0C, x;
            mad.lo.s32 r, p, $5, q;
            shr.u32 w, $2, 16;
            shr.u32 x, x, 16;
            prmt.b32 p, $3, 0x1C181614, w;
            prmt.b32 q, $4, 0x04080A0C, x;
            mad.lo.s32 q, p, $5, q;
            mov.b32 $0, r;
            mov.b32 $1, q;
            }""",
            "=&r,=&r,r,r,r,r",
            [word, zero | 0x13121110, zero | 0x0D0E0F10, zero | 1],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
