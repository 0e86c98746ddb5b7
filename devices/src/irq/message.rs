//! Interrupt messages, as the APICs send them to each other. SDM Vol. 3A, "Issuing Interprocessor
//! Interrupts" and "Message Signalled Interrupts".

/// What a message does at its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// A vectored interrupt for every destination.
    Fixed,
    /// A vectored interrupt for the destination with the lowest processor priority; of several,
    /// the one with the lowest index.
    LowestPriority,
    /// System-management interrupt.
    Smi,
    /// Non-maskable interrupt.
    Nmi,
    /// INIT.
    Init,
    /// Start-up IPI; the vector is the page at which to start.
    StartUp,
    /// The vector comes from the 8259 pair.
    ExtInt,
}

impl Delivery {
    /// From the three bits of an ICR, an LVT or a redirection entry; the reserved ones are `None`.
    pub fn from_bits(bits: u32) -> Option<Self> {
        match bits & 7 {
            0 => Some(Self::Fixed),
            1 => Some(Self::LowestPriority),
            2 => Some(Self::Smi),
            4 => Some(Self::Nmi),
            5 => Some(Self::Init),
            6 => Some(Self::StartUp),
            7 => Some(Self::ExtInt),
            _ => None,
        }
    }
}

/// Who receives a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The sender.
    Myself,
    /// All, with the sender.
    All,
    /// All but the sender.
    Others,
    /// By APIC ID.
    Physical(Address),
    /// By logical APIC ID.
    Logical(Address),
}

/// A destination address: eight bits from an xAPIC, an I/O APIC or a device, 32 from an x2APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// Eight bits.
    Narrow(u8),
    /// 32 bits.
    Wide(u32),
}

/// An interrupt message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who receives it.
    pub destination: Destination,
    /// What it does.
    pub delivery: Delivery,
    /// The vector.
    pub vector: u8,
    /// Level-triggered: its EOI is broadcast.
    pub level: bool,
}

impl Message {
    /// From a message-signalled interrupt's address and data; `None` for a reserved delivery mode.
    pub fn from_msi(address: u32, data: u32) -> Option<Self> {
        let narrow = Address::Narrow(((address >> 12) & 0xff) as u8);
        let destination = if address & (1 << 2) == 0 {
            Destination::Physical(narrow)
        } else {
            Destination::Logical(narrow)
        };
        Some(Self {
            destination,
            delivery: Delivery::from_bits(data >> 8)?,
            vector: (data & 0xff) as u8,
            level: data & (1 << 15) != 0,
        })
    }
}
