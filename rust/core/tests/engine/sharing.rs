//! Blocks that several sequences use: siblings of one request, and the prefix cache.

use std::collections::BTreeSet;

use chairlift_core::config::Settings;
use chairlift_core::request::{Finish, RequestId};

use super::harness::{Harness, Random, request, runs_ahead};
use super::scenarios::{plain, settings};

/// Case C18.
#[test]
fn siblings_share_the_prompt_and_part_on_write() {
    let mut harness = Harness::new(Settings {
        enable_prefix_caching: false,
        ..settings()
    });
    let mut new = plain(1, 10, 6);
    new.sampling.n = 4;
    new.stop.ignore_eos = true;
    harness.submit(new);
    assert!(harness.schedule());
    assert_eq!(
        harness.plan.logits_indices, [9; 4],
        "one row of logits, four samples"
    );
    assert_eq!(harness.plan.resets.rows.len(), 4);
    assert_eq!(
        harness.engine.metrics().used_blocks,
        3,
        "the prompt is computed and kept once"
    );
    harness.commit();
    assert_eq!(harness.engine.metrics().running_sequences, 4);
    assert!(harness.schedule());
    assert_eq!(
        harness.plan.block_copies.len(),
        3,
        "all but the last to write copy the open block"
    );
    assert_eq!(harness.engine.metrics().used_blocks, 2 + 4);
    harness.commit();
    harness.run_to_end();
    let answers: BTreeSet<_> = harness
        .client(1)
        .answers
        .iter()
        .map(|a| a.tokens.clone())
        .collect();
    assert_eq!(answers.len(), 4, "sampled independently");
}

#[test]
fn siblings_are_admitted_together_and_aborted_together() {
    if runs_ahead() {
        return;
    }
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 6, 40));
    harness.submit(plain(2, 6, 40));
    let mut new = plain(3, 6, 40);
    new.sampling.n = 3;
    harness.submit(new);
    for _ in 0..3 {
        harness.step();
    }
    assert_eq!(
        harness.client(3).scheduled,
        0,
        "two rows are free, three are needed"
    );
    harness.abort(1);
    harness.step();
    harness.step();
    assert!(
        harness
            .client(3)
            .answers
            .iter()
            .all(|answer| !answer.tokens.is_empty())
    );
    harness.abort(3);
    assert!(
        harness
            .client(3)
            .answers
            .iter()
            .all(|a| a.finish == Some(Finish::Abort))
    );
    assert_eq!(harness.engine.metrics().running_sequences, 1);
}

/// Cases C31: prompts around the block size, each twice, with the cache on and off.
#[test]
fn prefix_cache_edges() {
    for length in [3, 4, 5, 8] {
        let mut harness = Harness::new(settings());
        let mut new = plain(1, length, 6);
        for id in 1..=2 {
            new.id = RequestId(id);
            harness.submit(new.clone());
            harness.run_to_end();
        }
        assert_eq!(
            harness.client(1).answers[0].tokens,
            harness.client(2).answers[0].tokens
        );
        let cached = harness.engine.metrics().cached_tokens;
        assert_eq!(
            cached,
            u64::from((length - 1) / 4 * 4),
            "a prompt of {length} tokens"
        );
    }
}

#[test]
fn a_prompt_that_continues_an_answer_finds_all_of_it() {
    let mut harness = Harness::new(settings());
    harness.submit(plain(1, 6, 7));
    harness.run_to_end();
    let mut longer = harness.client(1).request.prompt.clone();
    longer.extend(&harness.client(1).answers[0].tokens);
    longer.push(5);
    harness.submit(request(2, longer, 3));
    harness.run_to_end();
    assert_eq!(harness.engine.metrics().cached_tokens, 12);
}

#[test]
fn a_salt_separates_and_what_was_not_computed_is_not_shared() {
    let mut harness = Harness::new(Settings {
        max_num_batched_tokens: 8,
        ..settings()
    });
    let mut new = plain(1, 20, 3);
    new.cache_salt = Some("one".into());
    harness.submit(new.clone());
    harness.step();
    harness.abort(1);
    new.id = RequestId(2);
    harness.submit(new.clone());
    harness.run_to_end();
    assert_eq!(
        harness.engine.metrics().cached_tokens,
        8,
        "only the first chunk was computed"
    );
    new.id = RequestId(3);
    new.cache_salt = Some("two".into());
    harness.submit(new);
    harness.run_to_end();
    assert_eq!(
        harness.engine.metrics().cached_tokens,
        8,
        "another salt finds nothing"
    );
}

#[test]
fn no_tenant_finds_what_another_computed_though_the_policy_names_none() {
    let mut harness = Harness::new(settings());
    let mut new = plain(1, 20, 3);
    for (id, tenant, cached) in [
        (1, "ann", 0),
        (2, "bob", 0),
        (3, "default", 0),
        (4, "ann", 16),
    ] {
        new.id = RequestId(id);
        let before = harness.engine.metrics().cached_tokens;
        harness.submit_for(tenant, "default", new.clone());
        harness.run_to_end();
        let found = harness.engine.metrics().cached_tokens - before;
        assert_eq!(found, cached, "request {id} of {tenant}");
    }
}

/// Case C31.
#[test]
fn the_cache_never_changes_an_answer() {
    let run = |enable_prefix_caching| {
        let mut harness = Harness::new(Settings {
            enable_prefix_caching,
            num_kv_blocks: 32,
            ..settings()
        });
        let mut random = Random(5);
        for id in 0..300 {
            let length = random.within(1, 20);
            let prompt = (0..length).map(|_| random.within(1, 2)).collect();
            harness.submit(request(id, prompt, random.within(1, 12)));
            if random.chance(20) {
                harness.abort(random.within(0, id as u32).into());
            }
            if random.chance(70) {
                harness.step();
            }
        }
        harness.run_to_end();
        assert_eq!(harness.engine.metrics().used_blocks, 0);
        harness.engine.metrics().cached_tokens
    };
    // Every answer is checked against its prompt as it comes.
    assert_eq!(run(false), 0);
    let cached = run(true);
    assert!(cached > 300, "{cached} cached tokens");
}
