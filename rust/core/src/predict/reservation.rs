//! When the head of the queue will fit, and who may go ahead of it until then.
//!
//! EASY backfill, from batch computing (Lifka, "The ANL/IBM SP Scheduling System", JSSPP'95): the first
//! that does not fit gets a reservation, the earliest time at which it will; others go ahead only if that
//! time does not move. Here time is counted in iterations and the resource is KV blocks (and rows): every
//! running sequence writes one token an iteration until its predicted end, and then frees what it holds.
//!
//! [`Curve`] is what is free over time. It only rises where somebody ends, and falls in between as
//! everybody grows, so it is known by its values at the ends: just before, where it is least, and after,
//! where the head may fit. The curve is in absolute iterations: it stays true while time passes, until
//! somebody comes, goes, or does not end when that was predicted.

/// What a running sequence holds, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// The first iteration that it is not in any more, by prediction.
    pub ends_at: u64,
    /// Tokens that it has now.
    pub tokens: u32,
    /// Blocks that come free when it ends, of those that it holds now.
    pub held: u32,
    /// Its rows.
    pub rows: u32,
}

/// Blocks and rows that must be free for the head to be admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Blocks.
    pub blocks: u32,
    /// Rows.
    pub rows: u32,
}

/// Who asks to go ahead.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// As it will be once it is admitted; `held` is what it takes at once.
    pub occupant: Occupant,
    /// Blocks that it can come to hold at most.
    pub most_blocks: u32,
}

/// The curve at an iteration where somebody ends.
#[derive(Clone, Copy, Debug)]
struct Point {
    at: u64,
    /// Free blocks in the iteration before.
    before: i64,
    /// Free blocks then; of those that end at once, only as many have ended as the head needs. For they
    /// rarely do, and what is left beside the head is easily thought too much.
    blocks: i64,
    rows: i64,
}

/// Free blocks and rows over the iterations to come.
#[derive(Debug, Default)]
pub struct Curve {
    block_size: u64,
    now: u64,
    free_blocks: i64,
    free_rows: i64,
    /// By the end.
    occupants: Vec<Occupant>,
    /// Of each occupant, the tokens in its last block: 1 to `block_size`. Apart, to be counted fast.
    fills: Vec<u32>,
    /// Up to the first at which the head fits.
    points: Vec<Point>,
    need: Need,
}

impl Curve {
    /// Makes a curve of what runs in iteration `now` while so much is free.
    pub fn rebuild(
        &mut self,
        now: u64,
        block_size: u32,
        free: Need,
        occupants: impl Iterator<Item = Occupant>,
    ) {
        self.now = now;
        self.block_size = u64::from(block_size);
        self.free_blocks = i64::from(free.blocks);
        self.free_rows = i64::from(free.rows);
        self.occupants.clear();
        self.occupants.extend(occupants);
        self.occupants
            .sort_unstable_by_key(|occupant| (occupant.ends_at, occupant.held));
        self.fills.clear();
        self.fills.extend(
            self.occupants
                .iter()
                .map(|occupant| fill(occupant.tokens, block_size)),
        );
        self.points.clear();
    }

    /// Whether it still says what it was made from: nobody was to end before iteration `now`.
    pub fn is_true_at(&self, now: u64) -> bool {
        self.occupants
            .first()
            .is_some_and(|occupant| occupant.ends_at > now)
    }

    /// The first iteration at which so much will be free; if that is never, the one when all have ended.
    pub fn reserve(&mut self, need: Need) -> u64 {
        if self.points.is_empty() || self.need != need {
            self.need = need;
            self.find_points();
        }
        self.start()
    }

    fn start(&self) -> u64 {
        self.points.last().map_or(self.now + 1, |point| point.at)
    }

    fn find_points(&mut self) {
        self.points.clear();
        let (mut ended, mut freed, mut rows) = (0, 0, self.free_rows);
        while let Some(&Occupant { ends_at: at, .. }) = self.occupants.get(ended) {
            let before = self.free_at(at.saturating_sub(1), ended, freed);
            let (mut blocks, mut fits) = (self.free_at(at, ended, freed), false);
            let (whole, above) = self.growth(at);
            while let Some(occupant) = self.occupants.get(ended).filter(|o| o.ends_at == at) {
                let grown = whole + u64::from(self.fills[ended] > above);
                blocks += i64::from(occupant.held) + grown as i64;
                freed += i64::from(occupant.held);
                rows += i64::from(occupant.rows);
                ended += 1;
                fits = blocks >= i64::from(self.need.blocks) && rows >= i64::from(self.need.rows);
                if fits {
                    break;
                }
            }
            self.points.push(Point {
                at,
                before,
                blocks,
                rows,
            });
            if fits {
                return;
            }
        }
    }

    /// Blocks that everybody has taken more by iteration `at`, and with how many tokens in its last block
    /// a sequence has taken one beside.
    ///
    /// With `f` tokens in it, it has taken `(f + t - 1) / block_size` after `t` iterations: that is one
    /// division for all of them.
    fn growth(&self, at: u64) -> (u64, u32) {
        let passed = at.saturating_sub(self.now);
        let (whole, rest) = (passed / self.block_size, passed % self.block_size);
        (whole, (self.block_size - rest) as u32)
    }

    /// Free blocks in iteration `at`, by when the first `ended` have ended and freed so many.
    fn free_at(&self, at: u64, ended: usize, freed: i64) -> i64 {
        let (whole, above) = self.growth(at);
        let running = &self.fills[ended..];
        let ahead = running.iter().map(|&fill| u64::from(fill > above));
        let grown = running.len() as u64 * whole + ahead.sum::<u64>();
        self.free_blocks + freed - grown as i64
    }

    /// Whether a candidate that joins in iteration `now` can run beside everybody without moving the start that was reserved: nobody
    /// lacks a block before because of it, and if it is still there then, what it holds at most is not
    /// missed.
    pub fn has_room_for(&self, candidate: &Candidate, now: u64) -> bool {
        let Candidate {
            occupant,
            most_blocks,
        } = *candidate;
        let start = self.start();
        let first = u64::from(fill(occupant.tokens, self.block_size as u32));
        let reaches = |at: u64| {
            let passed = at.saturating_sub(now);
            i64::from(occupant.held) + ((first + passed - 1) / self.block_size) as i64
        };
        let mut past = self.points.iter().filter(|p| p.at <= occupant.ends_at);
        if past.any(|point| point.before < reaches(point.at - 1)) {
            return false;
        }
        if occupant.ends_at <= start {
            let last = occupant.ends_at - 1;
            let ended = self.occupants.partition_point(|o| o.ends_at <= last);
            let freed = self.occupants[..ended].iter().map(|o| i64::from(o.held));
            return self.free_at(last, ended, freed.sum()) >= reaches(last);
        }
        self.points.last().is_some_and(|point| {
            let most = reaches(start).max(most_blocks.into());
            point.blocks - most >= i64::from(self.need.blocks)
                && point.rows - i64::from(occupant.rows) >= i64::from(self.need.rows)
        })
    }
}

/// Tokens in the last block.
fn fill(tokens: u32, block_size: u32) -> u32 {
    match tokens % block_size {
        0 => block_size,
        rest => rest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 4;

    fn occupant(ends_at: u64, tokens: u32) -> Occupant {
        Occupant {
            ends_at,
            tokens,
            held: tokens.div_ceil(BLOCK),
            rows: 1,
        }
    }

    fn free(blocks: u32) -> Need {
        Need { blocks, rows: 8 }
    }

    fn need(blocks: u32) -> Need {
        Need { blocks, rows: 1 }
    }

    fn curve(free_blocks: u32, occupants: &[Occupant]) -> Curve {
        let mut curve = Curve::default();
        curve.rebuild(10, BLOCK, free(free_blocks), occupants.iter().copied());
        curve
    }

    /// The same by walking through the iterations.
    fn free_in(free_blocks: u32, occupants: &[Occupant], at: u64) -> i64 {
        let change = |o: &Occupant| {
            if o.ends_at <= at {
                return i64::from(o.held);
            }
            let passed = (at - 10) as u32;
            let grown = (o.tokens + passed).div_ceil(BLOCK) - o.tokens.div_ceil(BLOCK);
            -i64::from(grown)
        };
        i64::from(free_blocks) + occupants.iter().map(change).sum::<i64>()
    }

    #[test]
    fn the_start_is_the_first_end_at_which_the_head_fits() {
        // 2, 1 and 3 blocks, and one that is free.
        let running = [occupant(12, 8), occupant(15, 3), occupant(30, 12)];
        let mut curve = curve(1, &running);
        // In iteration 12 the first is gone, and the two others took one block more in 11 or 12.
        assert_eq!(curve.reserve(need(1)), 12);
        assert_eq!(curve.reserve(need(2)), 15);
        assert_eq!(curve.reserve(need(7)), 30);
        assert_eq!(
            curve.reserve(need(100)),
            30,
            "at the latest when all are gone"
        );
        let rows = Need {
            blocks: 0,
            rows: 10,
        };
        assert_eq!(curve.reserve(rows), 15, "rows count too");
        assert!(curve.is_true_at(11) && !curve.is_true_at(12));
    }

    #[test]
    fn a_curve_equals_a_walk_through_the_iterations() {
        let mut state = 7_u32;
        let mut random = |most: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % most
        };
        let mut moved = 0;
        for _ in 0..2_000 {
            let running: Vec<Occupant> = (0..=random(6))
                .map(|_| occupant(11 + u64::from(random(30)), 1 + random(20)))
                .collect();
            let (blocks, wanted) = (random(12), need(8 + random(10)));
            let mut curve = curve(blocks, &running);
            let start = curve.reserve(wanted);
            let fits = |at| free_in(blocks, &running, at) >= i64::from(wanted.blocks);
            let first = (11..60).find(|&at| fits(at) && running.iter().any(|o| o.ends_at == at));
            let last = running.iter().map(|o| o.ends_at).max().unwrap();
            assert_eq!(start, first.unwrap_or(last));

            // Who is let in does not move it, and nobody lacks a block before.
            let tokens = 1 + random(12);
            let candidate = Candidate {
                occupant: occupant(11 + u64::from(random(40)), tokens),
                most_blocks: tokens.div_ceil(BLOCK) + random(4),
            };
            let held = candidate.occupant.held;
            let mut with = running.clone();
            with.push(candidate.occupant);
            if held > blocks {
                continue;
            }
            let until = start.min(candidate.occupant.ends_at);
            let lacks = (11..until).any(|at| free_in(blocks - held, &with, at) < 0);
            let moves = candidate.occupant.ends_at > start
                && free_in(blocks, &running, start) - i64::from(candidate.most_blocks)
                    < i64::from(wanted.blocks);
            if curve.has_room_for(&candidate, 10) {
                assert!(!lacks && !moves, "{running:?} {candidate:?} {wanted:?}");
                let mut after = Curve::default();
                after.rebuild(10, BLOCK, free(blocks - held), with.iter().copied());
                if first.is_some() {
                    assert!(after.reserve(wanted) <= start);
                }
                moved += 1;
            }
        }
        assert!(moved > 100, "{moved}");
    }
}
