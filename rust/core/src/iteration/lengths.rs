//! How long the answers of a request will be, by the narrowest belief that has seen enough of them: that
//! of its tenant in its class, else that of its class, else that of all. One answer is enough for a mean;
//! a quantile needs more.

use crate::config::policy::ClassId;
use crate::iteration::ledger::Ledger;
use crate::iteration::sequence::Sequence;
use crate::iteration::tally::Payer;
use crate::predict::output_length::LengthBelief;
use crate::request::SequenceKey;
use crate::waiting::tenants::TenantKey;

/// Answers after which a belief is used for quantiles.
const ENOUGH: u32 = 16;

impl Ledger {
    /// Counts an answer that ended by itself.
    pub(crate) fn learn_length(&mut self, key: SequenceKey) {
        let sequence = &self.sequences[key.0];
        let tokens = sequence.num_output_tokens();
        let Payer { class, tenant } = sequence.payer;
        self.lengths.learn(tokens);
        self.classes[class.0 as usize].lengths.learn(tokens);
        self.tenants.get_mut(tenant).learn_length(class, tokens);
    }

    /// What is believed of the answers of this class and tenant, by `enough` of them.
    fn belief(&self, class: ClassId, tenant: TenantKey, enough: u32) -> &LengthBelief {
        let of_tenant = self.tenants.get(tenant).lengths(class);
        let of_class = &self.classes[class.0 as usize].lengths;
        let mut narrowest = of_tenant.into_iter().chain([of_class]);
        let known = narrowest.find(|belief| belief.count() >= enough);
        known.unwrap_or(&self.lengths)
    }

    /// Output tokens that an answer of this class and tenant is expected to have.
    pub(crate) fn expected_length(&self, class: ClassId, tenant: TenantKey) -> f64 {
        self.belief(class, tenant, 1).mean()
    }

    /// Tokens that a sequence has still to write, at the median of what is believed of answers that are
    /// as long already.
    pub(crate) fn predicted_remaining(&self, key: SequenceKey) -> u32 {
        self.remaining_at(&self.sequences[key.0], 0.5)
    }

    /// The same at a quantile: at least 1, at most what its `max_tokens` leaves.
    pub(crate) fn remaining_at(&self, sequence: &Sequence, quantile: f64) -> u32 {
        let generated = sequence.num_output_tokens();
        let Payer { class, tenant } = sequence.payer;
        let belief = self.belief(class, tenant, ENOUGH);
        let length = belief.quantile_after(generated, quantile);
        let most = sequence.ending.max_tokens.saturating_sub(generated);
        (length - generated).min(most).max(1)
    }
}
