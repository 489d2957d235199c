//! The bytes of every token, handed over by Python once at start and shared behind an `Arc`.
//!
//! The tokenizer itself is never needed on the hot path: the text of a sequence is the
//! concatenation of its tokens' bytes. One flat buffer and one offset per token keep a vocabulary
//! of 128k tokens within about 1.5 MB and a look-up within one cache line or two.

/// Each token's bytes, and whether it is a special (control) token.
#[derive(Clone, Debug)]
pub struct TokenTable {
    bytes: Vec<u8>,
    /// `len() + 1` entries, rising; token `t` has `bytes[offsets[t]..offsets[t + 1]]`.
    offsets: Vec<u32>,
    special: Vec<bool>,
}

impl TokenTable {
    /// Takes the flat bytes, `V + 1` offsets into them and `V` flags (non-zero: special).
    pub fn new(bytes: Vec<u8>, offsets: &[i64], special: &[u8]) -> Result<Self, TokenTableError> {
        let tokens = offsets.len().saturating_sub(1);
        if tokens == 0 {
            return Err(TokenTableError::Empty {
                offsets: offsets.len(),
            });
        }
        if special.len() != tokens {
            return Err(TokenTableError::FlagCount {
                flags: special.len(),
                tokens,
            });
        }
        if u32::try_from(bytes.len()).is_err() {
            return Err(TokenTableError::TooLarge { bytes: bytes.len() });
        }
        let (first, last) = (offsets[0], offsets[tokens]);
        if first != 0 || usize::try_from(last) != Ok(bytes.len()) {
            return Err(TokenTableError::Ends {
                first,
                last,
                bytes: bytes.len(),
            });
        }
        if let Some(token) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            return Err(TokenTableError::Falling {
                token,
                begin: offsets[token],
                end: offsets[token + 1],
            });
        }
        Ok(Self {
            bytes,
            // In range: rising from 0 to the number of bytes, which fits.
            offsets: offsets.iter().map(|&offset| offset as u32).collect(),
            special: special.iter().map(|&flag| flag != 0).collect(),
        })
    }

    /// The token's bytes; none for an id beyond the table, as for an id without a token.
    #[inline]
    pub fn bytes(&self, token: u32) -> &[u8] {
        let token = token as usize;
        match (self.offsets.get(token), self.offsets.get(token + 1)) {
            (Some(&begin), Some(&end)) => &self.bytes[begin as usize..end as usize],
            _ => &[],
        }
    }

    /// Whether the token is a control token, which `skip_special_tokens` leaves out of the text.
    #[inline]
    pub fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }

    /// Number of token ids, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a table is never empty")]
    pub fn len(&self) -> usize {
        self.special.len()
    }
}

/// Why a token table was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenTableError {
    /// There are no tokens.
    #[error("the token table has {offsets} offsets: give one more than tokens, and at least 2")]
    Empty {
        /// Offsets given.
        offsets: usize,
    },
    /// The number of special flags is not the number of tokens.
    #[error("the token table has {flags} special flags for {tokens} tokens: give one per token")]
    FlagCount {
        /// Flags given.
        flags: usize,
        /// Tokens by the offsets.
        tokens: usize,
    },
    /// Offsets are kept as 32 bits.
    #[error("the token table has {bytes} bytes: at most 4294967295 are supported")]
    TooLarge {
        /// Bytes given.
        bytes: usize,
    },
    /// The offsets do not span the bytes.
    #[error(
        "the token table's offsets run from {first} to {last}: they must run from 0 to {bytes}, \
         the number of bytes"
    )]
    Ends {
        /// First offset.
        first: i64,
        /// Last offset.
        last: i64,
        /// Bytes given.
        bytes: usize,
    },
    /// An offset is smaller than the one before.
    #[error("token {token} begins at byte {begin} and ends at {end}: offsets must not fall")]
    Falling {
        /// The token.
        token: usize,
        /// Its first byte.
        begin: i64,
        /// The byte after its last.
        end: i64,
    },
}

impl TokenTableError {
    /// A stable name for programs.
    pub fn code(&self) -> &'static str {
        "bad_token_table"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_up_bytes_and_flags() {
        let table = TokenTable::new(b"abc".to_vec(), &[0, 2, 2, 3], &[0, 1, 0]).unwrap();
        assert_eq!(table.len(), 3);
        let bytes: Vec<&[u8]> = (0..5).map(|token| table.bytes(token)).collect();
        assert_eq!(bytes, [b"ab" as &[u8], b"", b"c", b"", b""]);
        let special: Vec<bool> = (0..4).map(|token| table.is_special(token)).collect();
        assert_eq!(special, [false, true, false, false]);
        assert_eq!(table.bytes(u32::MAX), b"");
    }

    #[test]
    fn refuses_what_does_not_fit_together() {
        let refuse = |offsets: &[i64], special: &[u8]| {
            let error = TokenTable::new(b"abc".to_vec(), offsets, special).unwrap_err();
            assert_eq!(error.code(), "bad_token_table");
            error
        };
        assert_eq!(refuse(&[], &[]), TokenTableError::Empty { offsets: 0 });
        assert_eq!(refuse(&[0], &[]), TokenTableError::Empty { offsets: 1 });
        let flags = TokenTableError::FlagCount {
            flags: 2,
            tokens: 1,
        };
        assert_eq!(refuse(&[0, 3], &[0, 0]), flags);
        for (offsets, first, last) in [([1, 2, 3], 1, 3), ([0, 2, 2], 0, 2), ([0, 2, -1], 0, -1)] {
            let bytes = 3;
            assert_eq!(
                refuse(&offsets, &[0, 0]),
                TokenTableError::Ends { first, last, bytes }
            );
        }
        for begin in [4, i64::MAX] {
            let falling = TokenTableError::Falling {
                token: 1,
                begin,
                end: 3,
            };
            assert_eq!(refuse(&[0, begin, 3], &[0, 0]), falling);
        }
    }
}
