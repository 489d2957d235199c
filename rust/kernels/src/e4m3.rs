//! Numbers of eight bits as caches hold them: e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep
//! Learning").
//!
//! One bit of sign, 4 of exponent (bias 7), 3 of mantissa; no infinities, S1111111 is NaN. The same
//! numbers as `cuda/fp8.cuh` and `PyTorch`'s `float8_e4m3fn`; what is too large becomes the largest.

/// An e4m3 number, as its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(u8);

/// The largest number.
const MAX: f32 = 448.0;
/// The least number with a whole mantissa, 2^-6; below it numbers are multiples of 2^-9.
const MIN_NORMAL: f32 = 0.015_625;
/// What lies between the exponents' biases, 127 and 7.
const BIAS: u32 = 120;

/// The number of every pattern of bits.
static VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        values[bits] = value_of(bits as u32);
        bits += 1;
    }
    values
};

const fn value_of(bits: u32) -> f32 {
    let size = bits & 0x7f;
    let value = match size {
        0x7f => f32::NAN,
        0..8 => size as f32 / 512.0,
        _ => f32::from_bits((size + (BIAS << 3)) << 20),
    };
    if bits & 0x80 == 0 { value } else { -value }
}

impl E4m3 {
    /// The number.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        VALUES[usize::from(self.0)]
    }

    /// The nearest number, ties to even, at most 448 in size; NaN stays NaN.
    #[inline(always)]
    pub fn from_f32(value: f32) -> Self {
        let sign = (value.to_bits() >> 24) as u8 & 0x80;
        if value.is_nan() {
            return Self(sign | 0x7f);
        }
        let size = value.abs().min(MAX);
        let bits = if size < MIN_NORMAL {
            // Eight of them are the least with a whole mantissa, and are written as it is.
            (size * 512.0).round_ties_even() as u8
        } else {
            let bits = size.to_bits();
            let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
            ((rounded >> 20) - (BIAS << 3)) as u8
        };
        Self(sign | bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_itself_and_numbers_between_go_to_the_nearest() {
        for bits in 0..=0x7e_u8 {
            let number = E4m3(bits).to_f32();
            assert_eq!(E4m3::from_f32(number), E4m3(bits));
            assert_eq!(E4m3::from_f32(-number), E4m3(bits | 0x80));
            if bits == 0x7e {
                break;
            }
            let next = E4m3(bits + 1).to_f32();
            assert!(next > number);
            let middle = f32::midpoint(number, next);
            assert_eq!(E4m3::from_f32(middle.next_down()), E4m3(bits));
            assert_eq!(E4m3::from_f32(middle), E4m3(bits + bits % 2));
            assert_eq!(E4m3::from_f32(middle.next_up()), E4m3(bits + 1));
        }
    }

    #[test]
    fn what_has_no_number() {
        assert_eq!(E4m3(0x7e).to_f32(), MAX);
        for large in [449.0, 1e9, f32::INFINITY] {
            assert_eq!(E4m3::from_f32(large), E4m3(0x7e));
            assert_eq!(E4m3::from_f32(-large), E4m3(0xfe));
        }
        assert!(E4m3::from_f32(f32::NAN).to_f32().is_nan());
        assert!(E4m3(0xff).to_f32().is_nan());
    }
}
