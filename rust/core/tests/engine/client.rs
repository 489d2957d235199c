//! What a client knows of its request, and what its text has to be.

use chairlift_core::output::TokenLogprob;
use chairlift_core::request::{Finish, NewRequest};

use super::harness::{EOS, candidates, letter};

/// What a client has received of one answer.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub text: String,
    pub finish: Option<Finish>,
}

/// What a client knows of one request.
#[derive(Debug)]
pub struct Client {
    pub request: NewRequest,
    pub answers: Vec<Answer>,
    /// Prompt tokens whose log-probability came.
    pub scored: usize,
    pub scheduled: u32,
    pub ended: u32,
}

impl Client {
    /// The next `num_tokens` of the prompt were scored.
    pub fn check_scores(&mut self, num_tokens: usize, logprobs: &[TokenLogprob]) {
        let num_best = self.request.sampling.prompt_logprobs.expect("asked for");
        let prompt = &self.request.prompt;
        let expected: Vec<TokenLogprob> = (self.scored + 1..)
            .take(num_tokens)
            .flat_map(|at| candidates(&prompt[..at], prompt[at], num_best))
            .collect();
        assert_eq!(logprobs, expected, "{}", self.request.id);
        self.scored += num_tokens;
    }
}

/// Compares an answer's text with what its tokens and its end call for.
pub fn check_text(request: &NewRequest, answer: &Answer) {
    let Some(finish) = answer.finish else {
        return;
    };
    let stop_token = matches!(finish, Finish::Eos | Finish::StopToken(_));
    let shown = &answer.tokens[..answer.tokens.len() - usize::from(stop_token)];
    let letters = |tokens: &[u32]| -> String {
        let shown = tokens.iter().filter(|&&token| token != EOS);
        shown.map(|&token| letter(token)).collect()
    };
    let whole = letters(shown);
    let stops: Vec<&str> = request
        .stop
        .stop
        .iter()
        .flat_map(|stop| stop.strings())
        .collect();
    // Where the earliest stop string ends that a searched token completes.
    let unsearched = letters(&shown[..shown.len().min(request.stop.min_tokens as usize)]).len();
    let ends = (unsearched + 1..=whole.len())
        .find(|&end| stops.iter().any(|stop| whole[..end].ends_with(stop)));
    if let Finish::StopString(index) = finish {
        assert_eq!(ends, Some(whole.len()), "{}: a stop was missed", request.id);
        let cut = whole.strip_suffix(stops[index as usize]);
        assert_eq!(answer.text, cut.expect("it ends with the stop"));
    } else {
        assert_eq!(ends, None, "{}: a stop was missed", request.id);
        assert_eq!(answer.text, whole, "{}: {finish:?}", request.id);
    }
}
