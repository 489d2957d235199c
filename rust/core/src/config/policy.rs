//! What classes and tenants were promised, and how the waiting queue keeps it.
//!
//! [`Policy`] is what a person writes; [`Rules`] is what the queue and the gate run with. The only way
//! from one to the other is [`Policy::validate`], so everything behind it can rely on names that
//! resolve and numbers in range. The rules themselves are in [`crate::waiting`] and
//! [`crate::iteration`]; here they only have their names and numbers.

use std::collections::BTreeMap;

use crate::config::memory::MemorySettings;
use crate::config::pace::Pace;
use crate::error::ConfigError;

/// Name of the class that exists where none is configured.
pub const DEFAULT_CLASS: &str = "default";
/// Name of the tenant of requests that name none.
pub const DEFAULT_TENANT: &str = "default";

/// What a waiting request gets when its maximum queue time is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum OnTimeout {
    /// It ends, with a clear error.
    #[default]
    Expire,
    /// It goes ahead of everything that was not promoted.
    Promote,
}

/// What a waiting request gets that will certainly miss its deadline or TTFT target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum OnDoomed {
    /// It keeps its place.
    #[default]
    Keep,
    /// It goes behind everything else: best effort.
    Relegate,
    /// It ends, with a clear error.
    Drop,
}

/// A class of requests: what they were promised.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ClassSettings {
    /// Its name.
    pub name: String,
    /// Strict tier; a higher level goes first, always.
    pub level: i32,
    /// Share of service among the classes of its level.
    pub weight: f64,
    /// Most requests of the class at the door and waiting.
    pub max_queued_requests: Option<u32>,
    /// Most prompt tokens of the class waiting.
    pub max_queued_tokens: Option<u64>,
    /// Longest time a request waits before it is first scheduled, in microseconds.
    pub max_queue_time_us: Option<u64>,
    /// What happens then.
    pub on_timeout: OnTimeout,
    /// Target of the time to first token, in microseconds; what will miss it is rejected at the door.
    pub ttft_target_us: Option<u64>,
    /// Target of the mean time per output token, in microseconds.
    pub tpot_target_us: Option<u64>,
    /// What happens to a waiting request that will certainly miss its deadline or TTFT target.
    pub on_doomed: OnDoomed,
    /// Whether waiting requests may be shed under overload.
    pub may_be_shed: bool,
}

impl ClassSettings {
    /// A class of level 0 and weight 1 without promises.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            level: 0,
            weight: 1.0,
            max_queued_requests: None,
            max_queued_tokens: None,
            max_queue_time_us: None,
            on_timeout: OnTimeout::default(),
            ttft_target_us: None,
            tpot_target_us: None,
            on_doomed: OnDoomed::default(),
            may_be_shed: false,
        }
    }
}

/// A tenant: its share and its bounds.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TenantSettings {
    /// Share of service among the tenants of a class.
    pub weight: f64,
    /// Class of its requests that name none; `None` is the first class.
    pub default_class: Option<String>,
    /// Class whose level its requests never exceed; `None` is no bound.
    pub best_class: Option<String>,
    /// Most answers that run at once.
    pub max_running: Option<u32>,
    /// Most requests at the door and waiting.
    pub max_queued: Option<u32>,
    /// Prompt and output tokens a second, on average.
    pub tokens_per_second: Option<u64>,
    /// Tokens that may be used at once after a pause; `None` is one second's worth.
    pub burst_tokens: Option<u64>,
}

impl Default for TenantSettings {
    fn default() -> Self {
        Self {
            weight: 1.0,
            default_class: None,
            best_class: None,
            max_running: None,
            max_queued: None,
            tokens_per_second: None,
            burst_tokens: None,
        }
    }
}

/// How siblings (classes of a level, tenants of a class, users of a tenant) share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Sharing {
    /// All requests of a level form one flow.
    #[default]
    Fcfs,
    /// The sibling with the least service for its weight is next.
    Fair,
}

/// What service costs.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Price {
    /// So much for each token.
    Tokens {
        /// A prompt token that is computed.
        input: f64,
        /// A prompt token found in the prefix cache.
        cached: f64,
        /// An output token.
        output: f64,
    },
    /// Microseconds of the iteration, shared out by the terms of the cost model, or by tokens while
    /// that is unknown.
    DeviceTime,
}

impl Default for Price {
    /// The prices of VTC (OSDI'24), with a discount for what costs no compute.
    fn default() -> Self {
        Self::Tokens {
            input: 1.0,
            cached: 0.1,
            output: 2.0,
        }
    }
}

/// Who is next among the requests of one flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Order {
    /// The oldest.
    #[default]
    Arrival,
    /// The one with the fewest predicted tokens, aged.
    Shortest,
    /// The one with the least predicted memory over time, aged.
    Footprint,
    /// The one with the earliest deadline.
    Deadline,
    /// Of the oldest few, the one with the longest cached prefix.
    Prefix,
}

/// When newcomers may join those that run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Join {
    /// At every iteration.
    #[default]
    Continuous,
    /// When nobody runs; and nobody leaves before all are done. A baseline.
    Static,
    /// As `Static`, but a batch is formed only when `size` requests wait or the oldest has waited
    /// `delay_us`. A baseline.
    Window {
        /// Answers that make a full batch.
        size: u32,
        /// Longest wait for a full batch, in microseconds.
        delay_us: u64,
    },
}

/// Overload: when waiting requests are shed, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Shedding {
    /// Predicted time to serve all that waits above which shedding begins, in microseconds.
    pub above_us: u64,
    /// The same, below which it ends.
    pub below_us: u64,
}

/// Classes, tenants, and how the waiting queue treats them.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Policy {
    /// The classes; requests that name none, of tenants that name none, are of the first.
    pub classes: Vec<ClassSettings>,
    /// Tenants with settings of their own, by name.
    pub tenants: BTreeMap<String, TenantSettings>,
    /// Settings of every other tenant.
    pub default_tenant: TenantSettings,
    /// How siblings share.
    pub sharing: Sharing,
    /// What service costs.
    pub price: Price,
    /// Whether the predicted output is charged at admission and trued up at the end.
    pub charge_predicted_output: bool,
    /// Who is next within a flow.
    pub order: Order,
    /// How much a token processed by the engine since it arrived moves a waiting request forward, in
    /// predicted tokens; for [`Order::Shortest`] and [`Order::Footprint`].
    pub ageing: f64,
    /// Longest wait behind higher levels until a request is first scheduled, in microseconds: some
    /// iterations earlier it is promoted, so that it is scheduled by then unless no place comes free.
    pub max_level_wait_us: Option<u64>,
    /// When newcomers may join.
    pub join: Join,
    /// Overload control.
    pub shedding: Option<Shedding>,
    /// Whether a request of a strictly higher level may preempt to be admitted.
    pub preempt_to_admit: bool,
    /// How memory is handed out.
    pub memory: MemorySettings,
    /// How long iterations may take.
    pub pace: Pace,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            classes: vec![ClassSettings::new(DEFAULT_CLASS)],
            tenants: BTreeMap::new(),
            default_tenant: TenantSettings::default(),
            sharing: Sharing::default(),
            price: Price::default(),
            charge_predicted_output: false,
            order: Order::default(),
            ageing: 0.01,
            max_level_wait_us: None,
            join: Join::default(),
            shedding: None,
            preempt_to_admit: true,
            memory: MemorySettings::default(),
            pace: Pace::default(),
        }
    }
}

/// Names a class: its position in [`Policy::classes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClassId(pub u32);

/// A policy that has been checked; read-only.
#[derive(Clone, Debug)]
pub struct Rules {
    policy: Policy,
    default_tenant: TenantRules,
    tenants: BTreeMap<String, TenantRules>,
}

/// A tenant's settings with names resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantRules {
    /// The settings.
    pub settings: TenantSettings,
    /// Class of its requests that name none.
    pub default_class: ClassId,
    /// Highest level of its requests.
    pub best_level: i32,
}

impl Policy {
    /// Checks every number and name.
    pub fn validate(&self) -> Result<Rules, ConfigError> {
        if self.classes.is_empty() {
            return Err(invalid("classes", "empty", "at least one class"));
        }
        for (position, class) in self.classes.iter().enumerate() {
            let key = |field: &str| format!("classes.{}.{field}", class.name);
            check_name("classes", &class.name)?;
            if self.classes[..position]
                .iter()
                .any(|c| c.name == class.name)
            {
                return Err(invalid("classes", &class.name, "named once"));
            }
            check_weight(key("weight"), class.weight)?;
            at_least_one(
                key("max_queued_requests"),
                class.max_queued_requests.map(u64::from),
            )?;
            at_least_one(key("max_queued_tokens"), class.max_queued_tokens)?;
            at_least_one(key("max_queue_time"), class.max_queue_time_us)?;
            at_least_one(key("ttft_target"), class.ttft_target_us)?;
            at_least_one(key("tpot_target"), class.tpot_target_us)?;
        }
        self.pace.validate()?;
        self.check_prices()?;
        self.memory.check()?;
        if !(self.ageing.is_finite() && self.ageing >= 0.0) {
            return Err(invalid(
                "queue.ageing",
                self.ageing,
                "a number of at least 0",
            ));
        }
        at_least_one("queue.max_level_wait".into(), self.max_level_wait_us)?;
        if let Join::Window { size: 0, .. } = self.join {
            return Err(invalid("queue.join.size", 0, "at least 1"));
        }
        if let Some(Shedding { above_us, below_us }) = self.shedding
            && below_us >= above_us
        {
            let allowed = format!("less than shedding.above ({above_us} us)");
            return Err(invalid("shedding.below", format!("{below_us} us"), allowed));
        }
        let default_tenant = self.tenant_rules("default_tenant", &self.default_tenant)?;
        let mut tenants = BTreeMap::new();
        for (name, tenant) in &self.tenants {
            check_name("tenants", name)?;
            let rules = self.tenant_rules(&format!("tenants.{name}"), tenant)?;
            tenants.insert(name.clone(), rules);
        }
        Ok(Rules {
            policy: self.clone(),
            default_tenant,
            tenants,
        })
    }

    fn check_prices(&self) -> Result<(), ConfigError> {
        let Price::Tokens {
            input,
            cached,
            output,
        } = self.price
        else {
            return Ok(());
        };
        let prices = [
            ("queue.price.input", input),
            ("queue.price.cached", cached),
            ("queue.price.output", output),
        ];
        for (key, price) in prices {
            if !(0.0..=1_000.0).contains(&price) {
                return Err(invalid(key, price, "from 0 to 1000"));
            }
        }
        Ok(())
    }

    fn tenant_rules(
        &self,
        key: &str,
        settings: &TenantSettings,
    ) -> Result<TenantRules, ConfigError> {
        let field = |field: &str| format!("{key}.{field}");
        check_weight(field("weight"), settings.weight)?;
        at_least_one(field("max_running"), settings.max_running.map(u64::from))?;
        at_least_one(field("max_queued"), settings.max_queued.map(u64::from))?;
        at_least_one(field("tokens_per_second"), settings.tokens_per_second)?;
        at_least_one(field("burst_tokens"), settings.burst_tokens)?;
        if settings.burst_tokens.is_some() && settings.tokens_per_second.is_none() {
            let burst = settings.burst_tokens.unwrap_or_default();
            let allowed = "left out where there is no tokens_per_second";
            return Err(invalid(field("burst_tokens"), burst, allowed));
        }
        let default_class = match &settings.default_class {
            None => ClassId(0),
            Some(name) => self.resolve(field("default_class"), name)?,
        };
        let best_level = match &settings.best_class {
            None => i32::MAX,
            Some(name) => self.level(self.resolve(field("best_class"), name)?),
        };
        if self.level(default_class) > best_level {
            let name = &self.classes[default_class.0 as usize].name;
            let allowed = "a class of a level that best_class allows";
            return Err(invalid(field("default_class"), name, allowed));
        }
        Ok(TenantRules {
            settings: settings.clone(),
            default_class,
            best_level,
        })
    }

    fn resolve(&self, key: String, name: &str) -> Result<ClassId, ConfigError> {
        let position = self.classes.iter().position(|class| class.name == name);
        position.map(|at| ClassId(at as u32)).ok_or_else(|| {
            let names: Vec<&str> = self.classes.iter().map(|c| c.name.as_str()).collect();
            invalid(
                key,
                name,
                format!("one of the classes: {}", names.join(", ")),
            )
        })
    }

    fn level(&self, class: ClassId) -> i32 {
        self.classes[class.0 as usize].level
    }
}

impl Rules {
    /// The policy as it was written.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The settings of a class.
    pub fn class(&self, class: ClassId) -> &ClassSettings {
        &self.policy.classes[class.0 as usize]
    }

    /// The class of that name.
    pub fn class_by_name(&self, name: &str) -> Option<ClassId> {
        let mut names = self.policy.classes.iter().map(|class| &class.name);
        names
            .position(|known| known == name)
            .map(|at| ClassId(at as u32))
    }

    /// The rules of a tenant; those that are not named share the default.
    pub fn tenant(&self, name: &str) -> &TenantRules {
        self.tenants.get(name).unwrap_or(&self.default_tenant)
    }

    /// The class of a request of `tenant` that asked for `class`: what it asked for or the tenant's
    /// default, but never of a higher level than the tenant's best; then it is the tenant's best
    /// class, or its default. `None`: there is no such class.
    pub fn choose_class(&self, tenant: &str, class: Option<&str>) -> Option<ClassId> {
        let rules = self.tenant(tenant);
        let chosen = match class {
            None => rules.default_class,
            Some(name) => self.class_by_name(name)?,
        };
        if self.class(chosen).level <= rules.best_level {
            return Some(chosen);
        }
        let best = rules.settings.best_class.as_deref();
        Some(
            best.and_then(|name| self.class_by_name(name))
                .unwrap_or(rules.default_class),
        )
    }

    /// Whether a running engine may go over to `next`: its classes are the same but for numbers.
    pub fn check_reload(&self, next: &Rules) -> Result<(), ConfigError> {
        let old = &self.policy;
        let new = &next.policy;
        let names = |policy: &Policy| -> Vec<(String, i32)> {
            let classes = policy.classes.iter();
            classes
                .map(|class| (class.name.clone(), class.level))
                .collect()
        };
        if names(old) != names(new) {
            let told: Vec<&str> = new.classes.iter().map(|c| c.name.as_str()).collect();
            let allowed = "the same classes with the same levels in a running engine";
            return Err(invalid("classes", told.join(", "), allowed));
        }
        let fixed = [
            ("queue.sharing", old.sharing == new.sharing),
            ("queue.price", old.price == new.price),
            ("queue.order", old.order == new.order),
            ("queue.join", old.join == new.join),
        ];
        match fixed.iter().find(|(_, same)| !same) {
            None => Ok(()),
            Some((key, _)) => Err(invalid(*key, "changed", "the same in a running engine")),
        }
    }
}

fn check_name(key: &str, name: &str) -> Result<(), ConfigError> {
    let printable = name.chars().all(|c| !c.is_control());
    if !name.is_empty() && name.len() <= 128 && printable {
        return Ok(());
    }
    let allowed = "a name of 1 to 128 bytes without control characters";
    Err(invalid(
        key,
        format!("\"{}\"", name.escape_default()),
        allowed,
    ))
}

fn check_weight(key: String, weight: f64) -> Result<(), ConfigError> {
    if (0.001..=1_000.0).contains(&weight) {
        return Ok(());
    }
    Err(invalid(key, weight, "from 0.001 to 1000"))
}

pub(super) fn at_least_one(key: String, value: Option<u64>) -> Result<(), ConfigError> {
    match value {
        Some(0) => Err(invalid(key, 0, "more than 0")),
        _ => Ok(()),
    }
}

pub(crate) fn invalid(
    key: impl Into<String>,
    value: impl std::fmt::Display,
    allowed: impl Into<String>,
) -> ConfigError {
    ConfigError::Invalid {
        key: key.into(),
        value: value.to_string(),
        allowed: allowed.into(),
    }
}
