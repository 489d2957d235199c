//! The bytes of every token, handed over by Python once at start and shared behind an `Arc`.
//!
//! The tokenizer itself is never needed on the hot path: the text of a sequence is the
//! concatenation of its tokens' bytes. Most tokens are whole characters: their text is known to be
//! UTF-8 from the start, and only the others are kept as bytes. A look-up reads one entry and its text:
//! a cache line or two. A vocabulary of 128k tokens takes about 4 MB.

/// Texts begin at multiples of this, so that appending one of at most as many bytes is one move of a
/// known size ([`PlainText::push_to`]).
const SLOT: usize = 16;

/// Each token's bytes, and whether it is a special (control) token.
#[derive(Clone, Debug)]
pub struct TokenTable {
    tokens: Vec<Token>,
    /// Those of tokens that are whole characters, each in slots of its own, filled up with NUL.
    text: String,
    /// Those of all others.
    bytes: Vec<u8>,
}

/// Where a token's bytes are.
#[derive(Clone, Copy, Debug)]
struct Token {
    begin: u32,
    end: u32,
    /// They are in the text.
    is_text: bool,
    is_special: bool,
}

impl TokenTable {
    /// Takes the flat bytes, `V + 1` offsets into them and `V` flags (non-zero: special).
    pub fn new(bytes: &[u8], offsets: &[i64], special: &[u8]) -> Result<Self, TokenTableError> {
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
        if u32::try_from(bytes.len() + tokens * SLOT).is_err() {
            return Err(TokenTableError::TooLarge {
                bytes: bytes.len(),
                tokens,
            });
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
        Ok(Self::from_parts(bytes, offsets, special))
    }

    fn from_parts(bytes: &[u8], offsets: &[i64], special: &[u8]) -> Self {
        let mut table = Self {
            tokens: Vec::with_capacity(special.len()),
            text: String::with_capacity(special.len() * SLOT),
            bytes: Vec::new(),
        };
        for (pair, &flag) in offsets.windows(2).zip(special) {
            // In range: rising from 0 to the number of bytes, which fits.
            let bytes = &bytes[pair[0] as usize..pair[1] as usize];
            let text = std::str::from_utf8(bytes).ok();
            let begin = if let Some(text) = text {
                let begin = table.text.len();
                table.text.push_str(text);
                let filled_up = begin + text.len().next_multiple_of(SLOT).max(SLOT);
                table
                    .text
                    .extend((table.text.len()..filled_up).map(|_| '\0'));
                begin
            } else {
                table.bytes.extend_from_slice(bytes);
                table.bytes.len() - bytes.len()
            };
            table.tokens.push(Token {
                begin: begin as u32,
                end: (begin + bytes.len()) as u32,
                is_text: text.is_some(),
                is_special: flag != 0,
            });
        }
        table
    }

    /// The token's text, or its bytes if they are not whole characters; no text for an id beyond the
    /// table, as for an id without a token.
    #[inline]
    pub fn text(&self, token: u32) -> Result<&str, &[u8]> {
        let Some(token) = self.tokens.get(token as usize) else {
            return Ok("");
        };
        let range = token.begin as usize..token.end as usize;
        if token.is_text {
            Ok(&self.text[range])
        } else {
            Err(&self.bytes[range])
        }
    }

    /// The token's text, if it is whole characters and no control token.
    #[inline]
    pub fn plain_text(&self, token: u32) -> Option<PlainText<'_>> {
        let token = self.tokens.get(token as usize)?;
        let (begin, end) = (token.begin as usize, token.end as usize);
        let is_plain = token.is_text && !token.is_special;
        is_plain.then(|| PlainText {
            slots: &self.text[begin..end.max(begin + SLOT)],
            len: end - begin,
        })
    }

    /// The token's bytes; none for an id beyond the table, as for an id without a token.
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.text(token).map_or_else(|bytes| bytes, str::as_bytes)
    }

    /// Whether the token is a control token, which `skip_special_tokens` leaves out of the text.
    #[inline]
    pub fn is_special(&self, token: u32) -> bool {
        let token = self.tokens.get(token as usize);
        token.is_some_and(|token| token.is_special)
    }

    /// Number of token ids, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a table is never empty")]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }
}

/// The text of a token that is whole characters, with what fills its slot up.
#[derive(Clone, Copy)]
pub struct PlainText<'a> {
    slots: &'a str,
    len: usize,
}

impl PlainText<'_> {
    /// Bytes of the text.
    #[inline]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there is no text.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Appends the text.
    #[inline]
    pub fn push_to(self, out: &mut String) {
        if self.slots.len() == SLOT {
            let end = out.len() + self.len;
            out.push_str(&self.slots[..SLOT]);
            out.truncate(end);
        } else {
            out.push_str(&self.slots[..self.len]);
        }
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
    #[error(
        "the token table has {bytes} bytes of {tokens} tokens: bytes and 16 for each token must be fewer \
         than 4294967296"
    )]
    TooLarge {
        /// Bytes given.
        bytes: usize,
        /// Tokens by the offsets.
        tokens: usize,
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
        let table = TokenTable::new(b"abc", &[0, 2, 2, 3], &[0, 1, 0]).unwrap();
        assert_eq!(table.len(), 3);
        let bytes: Vec<&[u8]> = (0..5).map(|token| table.bytes(token)).collect();
        assert_eq!(bytes, [b"ab" as &[u8], b"", b"c", b"", b""]);
        let special: Vec<bool> = (0..4).map(|token| table.is_special(token)).collect();
        assert_eq!(special, [false, true, false, false]);
        assert_eq!(table.bytes(u32::MAX), b"");
    }

    #[test]
    fn plain_text_is_appended_without_what_fills_its_slot_up() {
        let texts = [
            "",
            "a",
            "fifteen bytes..",
            "sixteen bytes...",
            "seventeen bytes..",
            "€€€€€€",
            "é",
        ];
        let mut offsets = vec![0];
        offsets.extend(texts.iter().scan(0, |end, text| {
            *end += text.len() as i64;
            Some(*end)
        }));
        let mut special = [0; 7];
        let table = TokenTable::new(texts.concat().as_bytes(), &offsets, &special).unwrap();
        let mut all = String::from(">");
        for (token, text) in (0..).zip(texts) {
            let plain = table.plain_text(token).expect("whole characters");
            assert_eq!(
                (plain.len(), plain.is_empty()),
                (text.len(), text.is_empty())
            );
            assert_eq!(table.text(token), Ok(text));
            plain.push_to(&mut all);
        }
        assert_eq!(all, format!(">{}", texts.concat()));
        special[1] = 1;
        let table = TokenTable::new(texts.concat().as_bytes(), &offsets, &special).unwrap();
        assert!(table.plain_text(1).is_none() && table.plain_text(7).is_none());
    }

    #[test]
    fn tells_text_from_parts_of_characters() {
        let table = TokenTable::new("aé€".as_bytes(), &[0, 1, 3, 5, 6, 6], &[0; 5]).unwrap();
        let texts: Vec<_> = (0..6).map(|token| table.text(token)).collect();
        let halves: [Result<&str, &[u8]>; 2] = [Err(b"\xe2\x82"), Err(b"\xac")];
        assert_eq!(
            texts,
            [Ok("a"), Ok("é"), halves[0], halves[1], Ok(""), Ok("")]
        );
        assert_eq!(table.bytes(1), "é".as_bytes());
        assert_eq!(table.bytes(3), b"\xac");
    }

    #[test]
    fn refuses_what_does_not_fit_together() {
        let refuse = |offsets: &[i64], special: &[u8]| {
            let error = TokenTable::new(b"abc", offsets, special).unwrap_err();
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
