//! The cost model on synthetic logs whose truth is known.

use super::*;

/// Seeded noise and choices (`SplitMix64`).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn below(&mut self, bound: u32) -> u32 {
        (self.next() * f64::from(bound)) as u32
    }

    /// A factor of about one with a standard deviation of `sigma`.
    fn noise(&mut self, sigma: f64) -> f64 {
        let sum: f64 = (0..12).map(|_| self.next()).sum();
        1.0 + sigma * (sum - 6.0)
    }
}

/// Every term counts, and the knee (at 170 tokens) is on no border of a bin.
const TRUTH: Coefficients = Coefficients {
    t0_us: 3_000.0,
    t_seq_us: 60.0,
    t_weights_us: 5_100.0,
    t_tok_us: 30.0,
    t_ctx_us: 0.1,
    t_pair_us: 0.003,
    t_sample_us: 40.0,
    t_copy_us: 100.0,
    most_tokens: 0.0,
};

/// A mixed iteration: decodes of short or long contexts with an answer or several, and often prefill.
/// All terms vary on their own, or their prices could not be told apart.
fn shape(random: &mut Random) -> StepShape {
    let mut shape = StepShape::default();
    let samples = 1 + 3 * random.below(2);
    let longest = 100 + random.below(8_000);
    for _ in 0..random.below(128) + u32::from(random.below(2) == 0) {
        shape.add_decode(1 + random.below(longest), samples);
    }
    if shape.sequences == 0.0 || random.below(3) == 0 {
        for _ in 0..=random.below(3) {
            let ends = u32::from(random.below(3) == 0);
            shape.add_chunk(random.below(6_000), 2 + random.below(600), ends);
        }
    }
    if random.below(4) == 0 {
        shape.copies = f64::from(random.below(200));
    }
    shape
}

fn trained(model: &mut CostModel, truth: &Coefficients, steps: u32, sigma: f64) -> Random {
    let mut random = Random(7);
    for _ in 0..steps {
        let shape = shape(&mut random);
        let time_us = truth.time(&shape) * random.noise(sigma);
        model.observe(&shape, time_us);
    }
    random
}

/// The largest relative error of what was learned.
fn worst(model: &CostModel, truth: &Coefficients) -> f64 {
    let learned = model.coefficients().expect("it is known");
    let mut random = Random(99);
    let errors = (0..500).map(|_| {
        let shape = shape(&mut random);
        (learned.time(&shape) / truth.time(&shape) - 1.0).abs()
    });
    errors.fold(0.0, f64::max)
}

#[test]
fn known_coefficients_come_back() {
    let mut model = CostModel::default();
    trained(&mut model, &TRUTH, 40_000, 0.03);
    let got = model.coefficients().expect("it is known");
    for ((name, value), (_, truth)) in got.named().into_iter().zip(TRUTH.named()).take(8) {
        let error = (value / truth - 1.0).abs();
        assert!(error < 0.02, "{name} is {value}, in truth {truth}");
    }
    assert!(worst(&model, &TRUTH) < 0.02, "{got:?}");
    let error = model.mean_error();
    assert!((0.02..0.03).contains(&error), "of noise alone: {error}");
}

#[test]
fn a_term_of_few_and_long_iterations_is_learned() {
    // A CPU's: what pairs cost shows in a few chunks that each take a hundred decodes' time.
    let truth = Coefficients {
        t0_us: 14_000.0,
        t_weights_us: 0.0,
        t_tok_us: 600.0,
        t_pair_us: 0.4,
        ..TRUTH
    };
    let mut model = CostModel::default();
    let mut random = Random(3);
    for step in 0..400 {
        let mut shape = StepShape::default();
        for _ in 0..=random.below(16) {
            shape.add_decode(1 + random.below(1_000), 1);
        }
        if step % 40 == 0 {
            shape.add_chunk(random.below(6_000), 200 + random.below(1_800), 1);
        }
        model.observe(&shape, truth.time(&shape) * random.noise(0.03));
    }
    let got = model.coefficients().expect("it is known").t_pair_us;
    let error = (got / truth.t_pair_us - 1.0).abs();
    assert!(
        error < 0.1,
        "a pair costs {got}, in truth {}",
        truth.t_pair_us
    );
}

#[test]
fn both_sides_of_the_knee_are_found_wherever_it_is() {
    for knee in [3.0, 24.0, 170.0, 900.0] {
        let truth = Coefficients {
            t_weights_us: knee * TRUTH.t_tok_us,
            ..TRUTH
        };
        let mut model = CostModel::default();
        trained(&mut model, &truth, 8_000, 0.03);
        let worst = worst(&model, &truth);
        assert!(worst < 0.03, "knee at {knee}: off by {worst}");
    }
}

#[test]
fn it_says_nothing_before_it_knows() {
    let mut model = CostModel::default();
    let mut random = Random(1);
    for seen in 0..FEWEST {
        let shape = shape(&mut random);
        assert_eq!(model.predict(&shape), None, "after {seen}");
        assert_eq!(model.observe(&shape, 1_000.0), None);
        assert_eq!(model.coefficients().is_some(), seen + 1 == FEWEST);
    }
    assert!(model.predict(&shape(&mut random)).is_some());
    assert!(CostModel::new(Some(TRUTH)).is_known());
}

#[test]
fn a_machine_that_stalls_now_and_then_is_seen_through() {
    let mut model = CostModel::default();
    let mut random = Random(7);
    for step in 0..8_000 {
        let shape = shape(&mut random);
        let mut time_us = TRUTH.time(&shape) * random.noise(0.03);
        if step % 50 == 3 {
            time_us *= 10.0; // also before anything is known
        }
        model.observe(&shape, time_us);
    }
    let worst = worst(&model, &TRUTH);
    assert!(worst < 0.05, "off by {worst}");
    let median = model.ratio(0.5).expect("known");
    assert!((median - 1.0).abs() < 0.05);
    let tail = model.ratio(0.99).expect("known");
    assert!(tail > 5.0, "one in fifty takes ten times as long");
}

#[test]
fn a_machine_that_becomes_slower_is_followed() {
    let mut model = CostModel::default();
    trained(&mut model, &TRUTH, 8_000, 0.03);
    let slower = Coefficients {
        t_tok_us: 1.5 * TRUTH.t_tok_us,
        t_weights_us: 1.5 * TRUTH.t_weights_us,
        ..TRUTH
    };
    assert!(worst(&model, &slower) > 0.2);
    trained(&mut model, &slower, 40_000, 0.03);
    let worst = worst(&model, &slower);
    assert!(worst < 0.05, "off by {worst}");
}

#[test]
fn long_decoding_does_not_wear_away_what_prefill_costs() {
    let mut model = CostModel::default();
    let mut random = trained(&mut model, &TRUTH, 8_000, 0.03);
    for _ in 0..50_000 {
        let mut shape = StepShape::default();
        for _ in 0..32 {
            shape.add_decode(1_000, 1);
        }
        let time_us = TRUTH.time(&shape) * random.noise(0.03);
        model.observe(&shape, time_us);
    }
    let worst = worst(&model, &TRUTH);
    assert!(worst < 0.05, "off by {worst}");
}

#[test]
fn what_was_loaded_holds_until_it_is_contradicted() {
    let mut model = CostModel::new(Some(TRUTH));
    let mut random = Random(5);
    for _ in 0..500 {
        let mut shape = StepShape::default();
        for _ in 0..=random.below(4) {
            shape.add_decode(500, 1);
        }
        let time_us = TRUTH.time(&shape) * random.noise(0.03);
        model.observe(&shape, time_us);
    }
    let kept = worst(&model, &TRUTH);
    assert!(kept < 0.05, "a few small decodes moved it by {kept}");
    let other = Coefficients {
        t_tok_us: 60.0,
        t_weights_us: 3_000.0,
        ..TRUTH
    };
    trained(&mut model, &other, 40_000, 0.03);
    let moved = worst(&model, &other);
    assert!(moved < 0.05, "off by {moved}: {:?}", model.coefficients());
}

/// Trains on a machine that is now as fast as `TRUTH`, now half as slow again, for `phase` iterations each.
fn trained_in_phases(model: &mut CostModel, steps: u32, phase: u32) {
    let mut random = Random(11);
    for step in 0..steps {
        let shape = shape(&mut random);
        let speed = if (step / phase).is_multiple_of(2) {
            1.0
        } else {
            1.5
        };
        let time_us = TRUTH.time(&shape) * speed * random.noise(0.03);
        model.observe(&shape, time_us);
    }
}

#[test]
fn predictions_follow_a_machine_that_is_now_slow_now_fast() {
    let mut model = CostModel::default();
    trained_in_phases(&mut model, 10_000, 100);
    // Of noise alone it is 0.024; about four iterations of each phase are not yet followed.
    let error = model.mean_error();
    assert!(error < 0.045, "off by {error}");
    let slowdown = model.slowdown();
    assert!((1.1..1.4).contains(&slowdown), "it is slow now: {slowdown}");
    let now = model.coefficients_now().expect("it is known");
    let mut random = Random(2);
    for _ in 0..100 {
        let shape = shape(&mut random);
        let predicted = model.predict(&shape).expect("it is known").now_us;
        assert!((now.time(&shape) / predicted - 1.0).abs() < 1e-9);
        let error = predicted / (1.5 * TRUTH.time(&shape)) - 1.0;
        assert!(error.abs() < 0.1, "off by {error}");
    }
    // What is learned, and kept on disk, is how fast it is in the long run.
    let learned = model.coefficients().expect("it is known");
    let shape = shape(&mut random);
    let long_run = learned.time(&shape) / TRUTH.time(&shape);
    assert!((1.05..1.4).contains(&long_run), "{long_run} times as slow");
}

#[test]
fn an_iteration_that_was_stalled_hardly_moves_the_next_prediction() {
    let mut model = CostModel::default();
    let mut random = trained(&mut model, &TRUTH, 2_000, 0.0);
    let stalled = shape(&mut random);
    let before = model.predict(&stalled).expect("it is known").now_us;
    model.observe(&stalled, 1e9);
    let after = model.predict(&stalled).expect("it is known").now_us;
    assert!(
        (1.0..1.14).contains(&(after / before)),
        "{before} to {after}"
    );
}

#[test]
fn the_same_log_gives_the_same_model_to_the_bit() {
    let models = [(); 2].map(|()| {
        let mut model = CostModel::default();
        trained(&mut model, &TRUTH, 3_000, 0.03);
        let named = model.coefficients().expect("known").named();
        named.map(|(_, value)| value.to_bits())
    });
    assert_eq!(models[0], models[1]);
}

#[test]
fn coefficients_are_never_negative() {
    // Time falls as there is more of everything, so any free fit would have negative terms.
    let mut model = CostModel::default();
    let mut random = Random(3);
    for _ in 0..2_000 {
        let shape = shape(&mut random);
        model.observe(&shape, 50_000.0 / (1.0 + shape.tokens));
        for (name, value) in model.coefficients().unwrap_or_default().named() {
            assert!(value >= 0.0 && value.is_finite(), "{name} is {value}");
        }
    }
}
