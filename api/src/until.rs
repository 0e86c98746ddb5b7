//! What a machine runs until.

use hindsight_cpu::stops::{PortWatchpoint, StopConditions, Watchpoint};

/// Port of COM1's data, and of the debug console.
const OUTPUT_PORTS: [u16; 2] = [0x3f8, 0xe9];

/// What a machine runs until: the first of several conditions.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Until {
    locations: Vec<String>,
    pub(crate) conditions: StopConditions,
    pub(crate) text: Option<Vec<u8>>,
    pub(crate) instructions: Option<u64>,
}

impl Until {
    /// Nothing: the machine runs to its end.
    pub fn new() -> Self {
        Self::default()
    }

    /// An instruction is about to be executed: a function's name, or an address such as `0x1000`.
    pub fn reaches(mut self, location: impl Into<String>) -> Self {
        self.locations.push(location.into());
        self
    }

    /// The instruction at a linear address is about to be executed.
    pub fn reaches_address(mut self, address: u64) -> Self {
        self.conditions.execute.push(address);
        self
    }

    /// Memory in a range of linear addresses is written.
    pub fn writes(self, address: u64, len: u64) -> Self {
        self.watch(address, len, false, true)
    }

    /// Memory in a range of linear addresses is read.
    pub fn reads(self, address: u64, len: u64) -> Self {
        self.watch(address, len, true, false)
    }

    /// Memory in a range of linear addresses is read or written.
    pub fn accesses(self, address: u64, len: u64) -> Self {
        self.watch(address, len, true, true)
    }

    /// An exception with this vector, 0 to 31, is raised.
    pub const fn raises(mut self, vector: u8) -> Self {
        if vector < 32 {
            self.conditions.exceptions |= 1 << vector;
        }
        self
    }

    /// The guest prints a text on COM1 or on the debug console.
    pub fn prints(mut self, text: impl AsRef<[u8]>) -> Self {
        self.text = Some(text.as_ref().to_vec());
        self.conditions.ports = OUTPUT_PORTS
            .map(|port| PortWatchpoint {
                first: port,
                last: port,
                read: false,
                write: true,
            })
            .to_vec();
        self
    }

    /// This many instructions are executed.
    pub const fn within(mut self, instructions: u64) -> Self {
        self.instructions = Some(instructions);
        self
    }

    fn watch(mut self, at: u64, len: u64, read: bool, write: bool) -> Self {
        self.conditions.watchpoints.push(Watchpoint {
            at,
            len: len.max(1),
            read,
            write,
        });
        self
    }

    /// The locations whose addresses the machine finds.
    pub(crate) fn locations(&self) -> impl Iterator<Item = &str> {
        self.locations.iter().map(String::as_str)
    }
}
