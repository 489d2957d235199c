//! Text: however bytes are split into tokens, the same text is delivered and cut at the same place.

use std::sync::Arc;

use chairlift_core::text::{StopMatch, StopStrings, StopText, TextState};

/// What a client has received in the end.
#[derive(Debug, PartialEq, Eq)]
struct Received {
    text: String,
    stopped_by: Option<u32>,
}

#[expect(clippy::unnecessary_wraps, reason = "what `TextState::new` takes")]
fn stops(strings: &[&str], text: StopText) -> Option<Arc<StopStrings>> {
    Some(Arc::new(StopStrings::new(strings, text).unwrap()))
}

/// Plays tokens the way commit does: those of whole characters as text, until a stop, else to the end.
///
/// Stops are not checked in the first `min_tokens` tokens.
fn play(tokens: &[&[u8]], stops: Option<Arc<StopStrings>>, min_tokens: usize) -> Received {
    let mut state = TextState::new(stops);
    let mut text = String::new();
    for (index, token) in tokens.iter().enumerate() {
        let check_stops = index >= min_tokens;
        let found = match std::str::from_utf8(token) {
            Ok(whole) => state.push_str(whole, check_stops, &mut text),
            Err(_) => state.push(token, check_stops, &mut text),
        };
        if let Some(StopMatch { string_index }) = found {
            let before = text.clone();
            assert_eq!(state.push(b"after", true, &mut text), None);
            state.finish(&mut text);
            assert_eq!(text, before, "text after a stop");
            let stopped_by = Some(string_index);
            return Received { text, stopped_by };
        }
    }
    state.finish(&mut text);
    let whole = text.clone();
    state.finish(&mut text);
    assert_eq!(text, whole, "finishing twice added text");
    Received {
        text,
        stopped_by: None,
    }
}

/// The rule, said plainly: try every end in order, the longest string that ends there wins.
///
/// Ends up to `unchecked` bytes do not count. `searched` is the text without the U+FFFD of an
/// incomplete sequence at the very end, `whole` is with it.
fn reference(
    searched: &str,
    whole: &str,
    strings: &[&str],
    kind: StopText,
    unchecked: usize,
) -> Received {
    for end in unchecked + 1..=searched.len() {
        let completed = strings
            .iter()
            .enumerate()
            .filter(|(_, string)| searched.as_bytes()[..end].ends_with(string.as_bytes()))
            .max_by_key(|&(index, string)| (string.len(), std::cmp::Reverse(index)));
        if let Some((index, string)) = completed {
            let cut = match kind {
                StopText::Excluded => end - string.len(),
                StopText::Included => end,
            };
            return Received {
                text: searched[..cut].into(),
                stopped_by: Some(index as u32),
            };
        }
    }
    Received {
        text: whole.into(),
        stopped_by: None,
    }
}

/// Splits `bytes` after every position whose bit is set in `cuts`.
fn split(bytes: &[u8], cuts: u64) -> Vec<&[u8]> {
    let mut tokens = Vec::new();
    let mut begin = 0;
    for end in 1..=bytes.len() {
        if end == bytes.len() || cuts >> (end - 1) & 1 == 1 {
            tokens.push(&bytes[begin..end]);
            begin = end;
        }
    }
    tokens
}

/// Calls `check` with every split of a short text, else with one byte a token and 1,000 random.
fn for_splits(bytes: &[u8], random: &mut Random, mut check: impl FnMut(&[&[u8]])) {
    if bytes.len() <= 12 {
        for cuts in 0..1 << bytes.len().saturating_sub(1) {
            check(&split(bytes, cuts));
        }
        return;
    }
    check(&bytes.chunks(1).collect::<Vec<_>>());
    for _ in 0..1_000 {
        let longest = 1 + random.below(9);
        let mut tokens: Vec<&[u8]> = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            // Empty tokens exist: ids without text.
            let (token, after) = rest.split_at(random.below(longest + 1).min(rest.len()));
            tokens.push(token);
            rest = after;
        }
        check(&tokens);
    }
}

/// `SplitMix64`: small, seeded, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}

/// The lines of `tests/data/utf8_strings.jsonl`: id and bytes.
fn utf8_lines() -> Vec<(String, Vec<u8>)> {
    let file = include_str!("../../../tests/data/utf8_strings.jsonl");
    let field = |line: &str, name: &str| {
        let start = format!("\"{name}\": \"");
        let begin = line.find(&start)? + start.len();
        let length = line[begin..].find('"')?;
        Some(line[begin..begin + length].to_owned())
    };
    let byte = |hex: &[u8]| u8::from_str_radix(std::str::from_utf8(hex).unwrap(), 16).unwrap();
    let lines: Vec<(String, Vec<u8>)> = file
        .lines()
        .map(|line| {
            let bytes = match field(line, "utf8_hex") {
                Some(hex) => hex.as_bytes().chunks(2).map(byte).collect(),
                // The long lines have no hex, and no escapes either.
                None => field(line, "text").unwrap().into_bytes(),
            };
            (field(line, "id").unwrap(), bytes)
        })
        .collect();
    assert_eq!(lines.len(), 41);
    lines
}

/// Case C12.
#[test]
fn every_split_of_every_line_gives_the_line() {
    let seed = 12;
    let mut random = Random(seed);
    let mut splits = 0;
    for (id, bytes) in utf8_lines() {
        let line = String::from_utf8(bytes.clone()).unwrap();
        for_splits(&bytes, &mut random, |tokens| {
            let received = play(tokens, None, 0);
            assert_eq!(received.text, line, "line {id}, seed {seed}, {tokens:?}");
            splits += 1;
        });
    }
    assert!(splits > 30_000, "{splits}");
}

#[test]
fn every_split_of_any_bytes_equals_the_lossy_decoding() {
    let seed = 7;
    let mut random = Random(seed);
    // Lead and continuation bytes at the borders of what is valid.
    let alphabet: Vec<u8> =
        b"a\x7f\x80\x8f\x90\x9f\xa0\xbf\xc1\xc2\xdf\xe0\xe1\xec\xed\xef".to_vec();
    let alphabet = [alphabet, b"\xf0\xf1\xf4\xf5\xff".to_vec()].concat();
    for round in 0..4_000 {
        let bytes: Vec<u8> = (0..=random.below(6))
            .map(|_| alphabet[random.below(alphabet.len())])
            .collect();
        let expected = String::from_utf8_lossy(&bytes);
        for_splits(&bytes, &mut random, |tokens| {
            let received = play(tokens, None, 0);
            assert_eq!(
                received.text, expected,
                "seed {seed}, round {round}, {tokens:x?}"
            );
        });
    }
}

#[test]
fn text_is_sent_as_soon_as_it_is_whole() {
    let mut state = TextState::new(None);
    let mut push = |bytes: &[u8]| {
        let mut delta = String::new();
        assert_eq!(state.push(bytes, true, &mut delta), None);
        delta
    };
    let deltas = [
        push(b" a\xe6"),
        push(b"\xbc"),
        push(b"\xa2b"),
        push(b"\xf0\x9f"),
        push(b"c"),
    ];
    assert_eq!(deltas, [" a", "", "\u{6f22}b", "", "\u{fffd}c"]);
}

/// Checks one text under every split against the reference; returns how many of them stopped.
fn check_against_reference(
    bytes: &[u8],
    strings: &[&str],
    min_tokens: usize,
    random: &mut Random,
    context: &str,
) -> usize {
    let mut stopped = 0;
    let whole = String::from_utf8_lossy(bytes);
    let whole_characters = |tokens: &[&[u8]]| {
        let (mut state, mut text) = (TextState::new(None), String::new());
        for token in tokens {
            state.push(token, true, &mut text);
        }
        text
    };
    let compiled =
        [StopText::Excluded, StopText::Included].map(|kind| (kind, stops(strings, kind)));
    for_splits(bytes, random, |tokens| {
        let searched = whole_characters(tokens);
        let unchecked = whole_characters(&tokens[..min_tokens.min(tokens.len())]).len();
        for (kind, compiled) in &compiled {
            let expected = reference(&searched, &whole, strings, *kind, unchecked);
            stopped += usize::from(expected.stopped_by.is_some());
            assert_eq!(
                play(tokens, compiled.clone(), min_tokens),
                expected,
                "{context}: stops {strings:?} {kind:?}, min_tokens {min_tokens}, {tokens:x?}"
            );
        }
    });
    stopped
}

/// Case C09.
#[test]
fn stops_equal_the_reference_for_all_texts_of_two_letters() {
    let seed = 9;
    let mut random = Random(seed);
    let words = [
        "a", "b", "aa", "ab", "ba", "aab", "aba", "bab", "abb", "aaba", "abab", "bbbb",
    ];
    let mut stopped = 0;
    for round in 0..30 {
        let strings: Vec<&str> = (0..=random.below(4)).map(|_| random.pick(&words)).collect();
        let min_tokens = random.below(4);
        for text in 0..1_u32 << 7 {
            let text: Vec<u8> = (0..7)
                .map(|bit| b"ab"[(text >> bit & 1) as usize])
                .collect();
            let context = format!("seed {seed}, round {round}");
            stopped += check_against_reference(&text, &strings, min_tokens, &mut random, &context);
        }
    }
    assert!(stopped > 100_000, "{stopped}");
}

#[test]
fn stops_equal_the_reference_for_random_unicode_and_broken_bytes() {
    let seed = 10;
    let mut random = Random(seed);
    let pieces: [&[u8]; 8] = [
        b"a",
        "\u{e9}".as_bytes(),
        "\u{e8}".as_bytes(),
        "\u{6f22}".as_bytes(),
        "\u{1f642}".as_bytes(),
        "\u{fffd}".as_bytes(),
        b"\xe6\xbc",
        b"\xf0\x9f",
    ];
    let words = [
        "a",
        "\u{e9}",
        "a\u{e8}",
        "\u{6f22}a",
        "\u{1f642}",
        "\u{fffd}",
        "\u{fffd}a",
        "\u{e9}\u{e9}a",
    ];
    let mut stopped = 0;
    for round in 0..300 {
        let strings: Vec<&str> = (0..=random.below(3)).map(|_| random.pick(&words)).collect();
        let min_tokens = random.below(4);
        let mut text = Vec::new();
        while text.len() < 8 {
            text.extend_from_slice(random.pick(&pieces));
        }
        let context = format!("seed {seed}, round {round}");
        stopped += check_against_reference(&text, &strings, min_tokens, &mut random, &context);
    }
    assert!(stopped > 10_000, "{stopped}");
}

/// Case C09.
#[test]
fn stops_inside_every_line_equal_the_reference() {
    let seed = 11;
    let mut random = Random(seed);
    for (id, bytes) in utf8_lines() {
        let line = String::from_utf8(bytes.clone()).unwrap();
        let from_middle: String = line
            .chars()
            .skip(line.chars().count() / 2)
            .take(3)
            .collect();
        let context = format!("line {id}, seed {seed}");
        let strings = [from_middle.as_str(), "never there"];
        let stopped = check_against_reference(&bytes, &strings, 0, &mut random, &context);
        assert!(stopped > 0, "{context}");
    }
}

fn tokens(script: &str) -> Vec<&[u8]> {
    script.split('|').map(str::as_bytes).collect()
}

#[test]
fn stop_across_tokens_of_a_script() {
    let script = tokens("al|pha| be|ta| ga|mma| de|lta");
    let stops = stops(&["beta gamma"], StopText::Excluded);
    let mut state = TextState::new(stops);
    let mut deltas = Vec::new();
    for token in script {
        let mut delta = String::new();
        let found = state.push(token, true, &mut delta);
        deltas.push(delta);
        if found.is_some() {
            assert_eq!(found, Some(StopMatch { string_index: 0 }));
            break;
        }
    }
    assert_eq!(
        deltas,
        ["al", "pha", " ", "", "", ""],
        "ends at the step of `mma`"
    );
}

#[test]
fn stop_inside_a_token() {
    let cut = |script, strings: &[&str], kind| play(&tokens(script), stops(strings, kind), 0);
    let received = cut("x|\",\\\"|y", &["\","], StopText::Excluded);
    assert_eq!(received.text, "x");
    assert_eq!(received.stopped_by, Some(0));
    assert_eq!(
        cut("x|\",\\\"|y", &["\","], StopText::Included).text,
        "x\","
    );
    assert_eq!(cut("banana", &["a"], StopText::Excluded).text, "b");
    // `}}` asked, the model says `}` twice, or `}}}` at once (S6).
    assert_eq!(cut("a}|}b", &["}}"], StopText::Excluded).text, "a");
    assert_eq!(cut("a|}}}|b", &["}}"], StopText::Excluded).text, "a");
}

#[test]
fn the_earliest_completion_wins_and_then_the_longest() {
    let cut = |strings: &[&str]| {
        play(
            &tokens("say hello world"),
            stops(strings, StopText::Excluded),
            0,
        )
    };
    let received = cut(&["hello world", "lo"]);
    assert_eq!(
        (received.text.as_str(), received.stopped_by),
        ("say hel", Some(1))
    );
    let received = cut(&["lo", "hello", "o"]);
    assert_eq!(
        (received.text.as_str(), received.stopped_by),
        ("say ", Some(1))
    );
    let received = cut(&["nothing", "of this"]);
    assert_eq!(
        (received.text.as_str(), received.stopped_by),
        ("say hello world", None)
    );
}

#[test]
fn no_stop_strings_is_the_same_as_none() {
    let received = play(&tokens("a|b"), stops(&[], StopText::Excluded), 0);
    assert_eq!((received.text.as_str(), received.stopped_by), ("ab", None));
}

#[test]
fn held_back_text_is_delivered_at_the_end() {
    let received = play(
        &tokens("al|pha| be|ta| ga"),
        stops(&["beta gamma"], StopText::Excluded),
        0,
    );
    assert_eq!(
        (received.text.as_str(), received.stopped_by),
        ("alpha beta ga", None)
    );
    let broken: [&[u8]; 2] = [b"beta", b" g\xe6\xbc"];
    let received = play(&broken, stops(&["beta gamma"], StopText::Excluded), 0);
    assert_eq!(received.text, "beta g\u{fffd}");
}

/// Case C20.
#[test]
fn stops_count_if_they_complete_after_min_tokens() {
    let cut = |min_tokens| {
        play(
            &tokens("al|pha| be|ta|beta|x"),
            stops(&["beta"], StopText::Excluded),
            min_tokens,
        )
        .text
    };
    assert_eq!(cut(3), "alpha ", "begins before, completes in token 4");
    assert_eq!(
        cut(4),
        "alpha beta",
        "the first completes too early, the second counts"
    );
    assert_eq!(cut(5), "alpha betabetax");
}

#[test]
fn what_cannot_become_a_stop_is_sent_at_once_before_min_tokens_too() {
    let mut state = TextState::new(stops(&["beta", "eta ray"], StopText::Excluded));
    let mut push = |text: &str| {
        let mut delta = String::new();
        assert_eq!(state.push(text.as_bytes(), false, &mut delta), None);
        delta
    };
    let deltas = [
        push("a be"),
        push("ta"),
        push(" r"),
        push("x"),
        push("beta"),
    ];
    assert_eq!(deltas, ["a ", "b", "", "eta rx", "b"]);
}

#[test]
fn children_share_the_strings_but_not_the_search() {
    let stops = stops(&["ab"], StopText::Excluded);
    let (mut first, mut text) = (TextState::new(stops), String::new());
    first.push(b"a", true, &mut text);
    let mut second = first.clone();
    assert!(first.push(b"b", true, &mut text).is_some());
    assert!(second.push(b"c", true, &mut text).is_none());
    assert_eq!(text, "ac");
}

/// Case C09.
#[test]
fn a_thousand_strings_and_two_thousand_tokens() {
    let strings: Vec<String> = (0..1_000).map(|i| format!("stop number {i:04}.")).collect();
    let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
    let script: Vec<String> = (0..2_000).map(|i| format!("stop number {i} ")).collect();
    let mut tokens: Vec<&[u8]> = script.iter().map(String::as_bytes).collect();
    let stops = stops(&strings, StopText::Excluded);
    let received = play(&tokens, stops.clone(), 0);
    assert_eq!(
        (received.text, received.stopped_by),
        (script.concat(), None)
    );
    tokens.push(b"stop number 0999.");
    let received = play(&tokens, stops, 0);
    assert_eq!(
        (received.text, received.stopped_by),
        (script.concat(), Some(999))
    );
}
