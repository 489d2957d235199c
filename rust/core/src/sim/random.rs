//! Seeded random numbers, one stream for each cause of chance.

/// What chance decides. Each cause has its own stream, so that more draws of one leave the others be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// How much longer or shorter than predicted an iteration takes.
    Noise,
    /// Who gives up, and when.
    Aborts,
    /// When the machine is slow.
    Slowness,
}

/// `SplitMix64` (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA'14).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of `cause` under `seed`.
    pub fn new(seed: u64, cause: Cause) -> Self {
        let stream = match cause {
            Cause::Noise => 1,
            Cause::Aborts => 2,
            Cause::Slowness => 3,
        };
        Self(mix(seed ^ mix(stream)))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Normal with mean 0 and variance 1 (Box and Muller, 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_0_and_variance_1() {
        let mut random = Random::new(1, Cause::Noise);
        let draws: Vec<f64> = (0..100_000).map(|_| random.normal()).collect();
        let mean = draws.iter().sum::<f64>() / 1e5;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.02, "variance {variance}");
    }

    #[test]
    fn causes_and_seeds_have_streams_of_their_own() {
        let first = |seed, cause| Random::new(seed, cause).bits();
        let noise = first(7, Cause::Noise);
        assert_eq!(noise, first(7, Cause::Noise));
        assert_ne!(noise, first(7, Cause::Aborts));
        assert_ne!(noise, first(7, Cause::Slowness));
        assert_ne!(noise, first(8, Cause::Noise));
    }
}
