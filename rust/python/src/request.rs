//! Requests as Python hands them over: read once, then plain Rust.

use std::collections::BTreeMap;
use std::sync::Arc;

use chairlift_core::config::policy::DEFAULT_TENANT;
use chairlift_core::request::{NewRequest, RequestId, SamplingParams, StopParams, Ticket};
use chairlift_core::text::{StopStrings, StopText};
use pyo3::prelude::*;

use crate::command::Submission;
use crate::errors::invalid_request;
use crate::policy::microseconds;

/// The attributes of `chairlift.SamplingParams` that the core needs.
#[derive(FromPyObject)]
struct ParamsView {
    n: u32,
    temperature: f32,
    top_p: f32,
    top_k: i64,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    include_stop_str_in_output: bool,
    max_tokens: Option<u32>,
    min_tokens: u32,
    ignore_eos: bool,
    skip_special_tokens: bool,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    logit_bias: BTreeMap<u32, f32>,
}

/// The attributes of `RequestArgs`: who asks, and for what.
#[derive(Clone, FromPyObject)]
pub struct RequestArgsView {
    tenant: String,
    request_class: Option<String>,
    user: Option<String>,
    priority: i32,
    deadline: Option<f64>,
}

impl Default for RequestArgsView {
    fn default() -> Self {
        Self {
            tenant: DEFAULT_TENANT.to_owned(),
            request_class: None,
            user: None,
            priority: 0,
            deadline: None,
        }
    }
}

impl RequestArgsView {
    /// What the gate is asked with.
    pub fn ticket(self, id: RequestId, n: u32) -> Ticket {
        Ticket {
            id,
            tenant: self.tenant,
            class: self.request_class,
            user: self.user,
            n,
        }
    }
}

/// A request that can be checked and submitted, any number of times: each submission is a new one.
#[pyclass(frozen, module = "chairlift._core")]
pub struct Request {
    args: RequestArgsView,
    prototype: NewRequest,
}

impl Request {
    /// The request under a name of its own, with its ticket.
    pub fn named(&self, id: RequestId) -> (Ticket, Submission) {
        let request = NewRequest {
            id,
            ..self.prototype.clone()
        };
        let ticket = self.args.clone().ticket(id, request.sampling.n);
        let time_left_us = self.args.deadline.map(microseconds);
        let submission = Submission {
            request,
            time_left_us,
        };
        (ticket, submission)
    }
}

#[pymethods]
impl Request {
    /// `params` has the attributes of `SamplingParams`, `args` those of `RequestArgs`; `seed` is the
    /// key of the random stream.
    #[new]
    #[pyo3(signature = (prompt_token_ids, params, args = None, *, seed, cache_salt = None))]
    fn new(
        prompt_token_ids: &Bound<'_, PyAny>,
        params: &Bound<'_, PyAny>,
        args: Option<RequestArgsView>,
        seed: u64,
        cache_salt: Option<String>,
    ) -> PyResult<Self> {
        let args = args.unwrap_or_default();
        let prompt = read(
            prompt_token_ids,
            "prompt_token_ids must be a list of token ids",
        )?;
        let params: ParamsView = read(params, "a sampling parameter cannot be used")?;
        let stop = compile_stop(&params.stop, params.include_stop_str_in_output)?;
        Ok(Self {
            prototype: NewRequest {
                id: RequestId(0),
                prompt,
                sampling: SamplingParams {
                    n: params.n,
                    temperature: params.temperature,
                    top_p: params.top_p,
                    top_k: u32::try_from(params.top_k.max(0)).unwrap_or(0),
                    min_p: params.min_p,
                    repetition_penalty: params.repetition_penalty,
                    presence_penalty: params.presence_penalty,
                    frequency_penalty: params.frequency_penalty,
                    seed,
                    logit_bias: params.logit_bias.into_iter().collect(),
                    logprobs: params.logprobs,
                    prompt_logprobs: params.prompt_logprobs,
                },
                stop: StopParams {
                    max_tokens: params.max_tokens,
                    min_tokens: params.min_tokens,
                    stop,
                    stop_token_ids: params.stop_token_ids,
                    include_stop_token_in_text: params.include_stop_str_in_output,
                    ignore_eos: params.ignore_eos,
                    skip_special_tokens: params.skip_special_tokens,
                },
                cache_salt,
                priority: args.priority,
                deadline: None, // told from its arrival
            },
            args,
        })
    }
}

/// Converts a Python value, or says what it should have been.
fn read<'a, 'py, T: FromPyObject<'a, 'py>>(
    value: &'a Bound<'py, PyAny>,
    complaint: &str,
) -> PyResult<T> {
    value.extract().map_err(|error: T::Error| {
        let error: PyErr = error.into();
        let detail = error.value(value.py()).to_string();
        invalid_request(&format!("{complaint}: {detail}"), "invalid_parameter")
    })
}

fn compile_stop(strings: &[String], included: bool) -> PyResult<Option<Arc<StopStrings>>> {
    if strings.is_empty() {
        return Ok(None);
    }
    let text = if included {
        StopText::Included
    } else {
        StopText::Excluded
    };
    match StopStrings::new(strings, text) {
        Ok(stop) => Ok(Some(Arc::new(stop))),
        Err(error) => Err(invalid_request(&error.to_string(), error.code())),
    }
}
