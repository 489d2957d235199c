//! Row resets of a step plan: flat arrays in, checked row states out.
//!
//! A reset is all or nothing: every row is checked before the first one is replaced.

use std::ops::Range;

use super::row::{Row, RowParams};
use super::{Sampler, SamplerError};

/// Floats per row: temperature, `top_p`, `min_p`, repetition, presence, frequency penalty.
pub const FLOATS: usize = 6;
/// Integers per row: `top_k`, seed, child, logprobs, number of prompt ids, `min_tokens`.
pub const INTS: usize = 6;

/// Borrowed arrays of a plan's row resets, `R` rows.
#[derive(Clone, Copy, Debug)]
pub struct ResetArrays<'a> {
    /// `[R]` rows to reset.
    pub rows: &'a [i32],
    /// `[R, FLOATS]`.
    pub floats: &'a [f32],
    /// `[R, INTS]`.
    pub ints: &'a [i64],
    /// `[R, 2]` range of `ids`: prompt, then output.
    pub id_ranges: &'a [i32],
    /// `[R, 2]` range of `bias_ids` and `bias_values`.
    pub bias_ranges: &'a [i32],
    /// `[R, 2]` range of `suppressed_ids`.
    pub suppressed_ranges: &'a [i32],
    /// Ragged token ids.
    pub ids: &'a [i32],
    /// Ragged token ids with a bias.
    pub bias_ids: &'a [i32],
    /// Their biases.
    pub bias_values: &'a [f32],
    /// Ragged token ids that `min_tokens` suppresses.
    pub suppressed_ids: &'a [i32],
}

impl Sampler {
    /// Resets all rows of the arrays, or none if anything is wrong with one.
    pub fn reset_rows(&mut self, arrays: ResetArrays<'_>) -> Result<(), SamplerError> {
        let count = arrays.rows.len();
        let fits = arrays.floats.len() == count * FLOATS
            && arrays.ints.len() == count * INTS
            && arrays.id_ranges.len() == 2 * count
            && arrays.bias_ranges.len() == 2 * count
            && arrays.suppressed_ranges.len() == 2 * count
            && arrays.bias_ids.len() == arrays.bias_values.len();
        if !fits {
            return Err(SamplerError::Shape(format!(
                "the arrays do not fit {count} row resets"
            )));
        }
        self.check_tokens("ids", arrays.ids)?;
        self.check_tokens("bias_ids", arrays.bias_ids)?;
        self.check_tokens("suppressed_ids", arrays.suppressed_ids)?;
        let mut states = Vec::with_capacity(count);
        for i in 0..count {
            let row = self.check_row(arrays.rows[i].into())?;
            states.push((row, state(&arrays, i)?));
        }
        for (row, state) in states {
            self.reset(row, state);
        }
        Ok(())
    }
}

fn state(arrays: &ResetArrays<'_>, i: usize) -> Result<Row, SamplerError> {
    let row = i64::from(arrays.rows[i]);
    let ints = &arrays.ints[INTS * i..][..INTS];
    let params = params(row, &arrays.floats[FLOATS * i..][..FLOATS], ints)?;
    let ids = &arrays.ids[range(row, arrays.id_ranges, i, arrays.ids.len())?];
    let prompt_len = usize::try_from(ints[4])
        .unwrap_or(usize::MAX)
        .min(ids.len());
    let (prompt, output) = ids.split_at(prompt_len);
    let biased = range(row, arrays.bias_ranges, i, arrays.bias_ids.len())?;
    let bias_values = &arrays.bias_values[biased.clone()];
    if let Some(bad) = bias_values.iter().find(|bias| bias.is_nan()) {
        return Err(SamplerError::Parameter {
            row,
            what: format!("logit bias {bad}"),
        });
    }
    let bias_ids = arrays.bias_ids[biased].iter().map(|id| id.cast_unsigned());
    let bias = bias_ids.zip(bias_values.iter().copied()).collect();
    let suppressed = range(
        row,
        arrays.suppressed_ranges,
        i,
        arrays.suppressed_ids.len(),
    )?;
    let suppressed = &arrays.suppressed_ids[suppressed];
    let suppressed = suppressed.iter().map(|id| id.cast_unsigned()).collect();
    Ok(Row::new(params, prompt, output, bias, suppressed))
}

fn params(row: i64, floats: &[f32], ints: &[i64]) -> Result<RowParams, SamplerError> {
    let &[
        temperature,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
    ] = floats
    else {
        unreachable!("six floats per row");
    };
    let checks = [
        (
            "temperature",
            temperature,
            temperature >= 0.0 && temperature.is_finite(),
        ),
        ("top_p", top_p, top_p > 0.0),
        ("min_p", min_p, (0.0..=1.0).contains(&min_p)),
        (
            "repetition penalty",
            repetition_penalty,
            repetition_penalty > 0.0,
        ),
        (
            "presence penalty",
            presence_penalty,
            presence_penalty.is_finite(),
        ),
        (
            "frequency penalty",
            frequency_penalty,
            frequency_penalty.is_finite(),
        ),
    ];
    if let Some((name, value, _)) = checks.iter().find(|(_, _, is_good)| !is_good) {
        return Err(SamplerError::Parameter {
            row,
            what: format!("{name} {value}"),
        });
    }
    Ok(RowParams {
        temperature,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        top_k: usize::try_from(ints[0]).unwrap_or(0),
        seed: ints[1].cast_unsigned(),
        child: ints[2] as u32,
        logprobs: usize::try_from(ints[3]).ok(),
        min_tokens: u32::try_from(ints[5].max(0)).unwrap_or(u32::MAX),
    })
}

fn range(row: i64, ranges: &[i32], i: usize, length: usize) -> Result<Range<usize>, SamplerError> {
    let (begin, end) = (ranges[2 * i], ranges[2 * i + 1]);
    let is_good = 0 <= begin && begin <= end && usize::try_from(end).is_ok_and(|end| end <= length);
    if !is_good {
        let what = format!("range [{begin}, {end}) of {length} entries");
        return Err(SamplerError::Parameter { row, what });
    }
    Ok(begin as usize..end as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: ResetArrays<'static> = ResetArrays {
        rows: &[1],
        floats: &[0.5, 0.9, 0.1, 1.1, 0.2, 0.3],
        ints: &[40, -1, 2, 5, 1, 3],
        id_ranges: &[0, 2],
        bias_ranges: &[0, 1],
        suppressed_ranges: &[0, 1],
        ids: &[7, 8],
        bias_ids: &[3],
        bias_values: &[1.0],
        suppressed_ids: &[9],
    };

    #[test]
    fn parameters_arrive_in_their_places() {
        let mut sampler = Sampler::new(2, 10);
        sampler.reset_rows(GOOD).unwrap();
        let expected = RowParams {
            temperature: 0.5,
            top_p: 0.9,
            min_p: 0.1,
            repetition_penalty: 1.1,
            presence_penalty: 0.2,
            frequency_penalty: 0.3,
            top_k: 40,
            seed: u64::MAX,
            child: 2,
            logprobs: Some(5),
            min_tokens: 3,
        };
        assert_eq!(sampler.rows[1].params, expected);
    }

    #[test]
    fn bad_resets_change_nothing() {
        let cases = [
            ResetArrays { rows: &[2], ..GOOD },
            ResetArrays {
                rows: &[-1],
                ..GOOD
            },
            ResetArrays {
                rows: &[0, 1],
                ..GOOD
            },
            ResetArrays {
                floats: &[f32::NAN, 0.9, 0.1, 1.1, 0.2, 0.3],
                ..GOOD
            },
            ResetArrays {
                floats: &[0.5, 0.0, 0.1, 1.1, 0.2, 0.3],
                ..GOOD
            },
            ResetArrays {
                floats: &[0.5, 0.9, 0.1, 0.0, 0.2, 0.3],
                ..GOOD
            },
            ResetArrays {
                id_ranges: &[0, 3],
                ..GOOD
            },
            ResetArrays {
                bias_ranges: &[1, 0],
                ..GOOD
            },
            ResetArrays {
                suppressed_ids: &[10],
                ..GOOD
            },
            ResetArrays {
                ids: &[7, -8],
                ..GOOD
            },
            ResetArrays {
                bias_values: &[f32::NAN],
                ..GOOD
            },
        ];
        for arrays in cases {
            let mut sampler = Sampler::new(2, 10);
            assert!(sampler.reset_rows(arrays).is_err(), "{arrays:?}");
            assert_eq!(sampler.rows[1].params, RowParams::default());
        }
    }
}
