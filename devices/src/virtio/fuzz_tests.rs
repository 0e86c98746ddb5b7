//! Arbitrary register accesses and ring contents: no device panics, hangs or writes outside of memory.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::VirtioDevice;
use super::block::VirtioDisk;
use super::console::{ConsolePort, PortInput, VirtioConsole};
use super::entropy::{Entropy, SeededEntropy};
use super::filesystem::{FileSystem, FuseServer};
use super::network::{FrameSink, Network, ReceivedFrames};
use super::overlay::Overlay;
use super::scsi::VirtioCdrom;
use super::test_driver::{Driver, MemoryDisk};

#[derive(Clone, Debug)]
enum Step {
    ConfigWrite(usize, Vec<u8>),
    BarWrite(usize, u64, Vec<u8>),
    BarRead(usize, u64, usize),
    Memory(u64, Vec<u8>),
    Descriptor(u64, u16, u64, u32, u16, u16),
    Offer(u64, u16),
    Feed(u64, u32),
    Backlog,
    Start,
    Restore,
}

/// A host that drops frames, and answers messages with more bytes than there may be room for.
struct IdlePeer;

impl FrameSink for IdlePeer {
    fn send(&mut self, _: &[u8]) {}
}

impl FuseServer for IdlePeer {
    fn answer(&mut self, request: &[u8], _: &mut [u8]) -> usize {
        request[0].into()
    }

    fn reset(&mut self) {}
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(vec![0; 4]),
        prop::collection::vec(any::<u8>(), 1..9)
            .prop_filter("sizes", |v| [1, 2, 4, 8].contains(&v.len())),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let address = prop_oneof![4 => 0..0x10_0000_u64, 1 => any::<u64>()];
    let len = prop_oneof![4 => 0..2000_u32, 1 => any::<u32>()];
    prop_oneof![
        1 => (0..300_usize, bytes()).prop_map(|(at, data)| Step::ConfigWrite(at, data)),
        1 => (0..2_usize, 0..0x4000_u64, bytes()).prop_map(|(bar, at, data)| Step::BarWrite(bar, at, data)),
        1 => (0..1_usize, 0..0x40_u64, bytes()).prop_map(|(bar, at, data)| Step::BarWrite(bar, at, data)),
        1 => (0..2_usize, 0..0x4000_u64, 1..9_usize).prop_map(|(bar, at, len)| Step::BarRead(bar, at, len)),
        1 => (0..0x10_000_u64, bytes()).prop_map(|(at, data)| Step::Memory(at, data)),
        4 => (0..6_u64, 0..8_u16, address, len, 0..8_u16, 0..9_u16)
            .prop_map(|(q, i, address, len, flags, next)| Step::Descriptor(q, i, address, len, flags, next)),
        4 => (0..6_u64, 0..9_u16).prop_map(|(queue, head)| Step::Offer(queue, head)),
        1 => (0..6_u64, 0..3000_u32).prop_map(|(queue, count)| Step::Feed(queue, count)),
        1 => Just(Step::Backlog),
        1 => Just(Step::Start),
        1 => Just(Step::Restore),
    ]
}

fn run(device: Box<dyn VirtioDevice>, steps: &[Step]) {
    let mut driver = Driver::new(device);
    driver.start(0);
    for step in steps {
        match step {
            Step::ConfigWrite(at, data) => driver.function().config_write(*at, data),
            Step::BarWrite(bar, at, data) => driver.function().bar_write(*bar, *at, data),
            Step::BarRead(bar, at, len) => {
                driver.function().bar_read(*bar, *at, &mut vec![0; *len]);
                let mut data = [0; 4];
                driver
                    .function()
                    .config_read(usize::try_from(*at).unwrap(), &mut data);
            }
            Step::Memory(at, data) => driver.memory.write_slice(data, GuestAddress(*at)).unwrap(),
            Step::Descriptor(queue, index, address, len, flags, next) => {
                driver.descriptor(*queue, *index, *address, *len, *flags, *next);
            }
            Step::Offer(queue, head) => driver.offer(*queue, *head),
            Step::Feed(queue, count) => driver.feed(*queue, *count),
            Step::Backlog => driver.function().serve_backlog(),
            Step::Start => driver.start(1 << 29),
            Step::Restore => {
                let saved = driver.function().save();
                // Rings may have been moved out of memory after they were enabled: they cannot.
                driver.function().restore(&saved).unwrap();
                assert_eq!(driver.function().save(), saved);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn disk_survives_any_driver(steps in prop::collection::vec(step(), 1..100)) {
        let disk = MemoryDisk::new(vec![0x55; 0x10_000]);
        let overlay = Overlay::new(Box::new(disk), 0x4000);
        run(Box::new(VirtioDisk::new(Box::new(overlay), "fuzz", 2)), &steps);
    }

    #[test]
    fn cdrom_survives_any_driver(steps in prop::collection::vec(step(), 1..100)) {
        let disc = MemoryDisk::new(vec![0x55; 0x10_000]);
        run(Box::new(VirtioCdrom::new(Box::new(disc), "fuzz")), &steps);
    }

    #[test]
    fn console_survives_any_driver(steps in prop::collection::vec(step(), 1..100)) {
        let input = PortInput::default();
        input.push(&[7; 100]);
        let port = |is_console| ConsolePort {
            name: "port".to_owned(),
            is_console,
            output: Box::new(std::io::sink()),
            input: input.clone(),
        };
        run(Box::new(VirtioConsole::new(vec![port(true), port(false)])), &steps);
    }

    #[test]
    fn network_card_survives_any_driver(steps in prop::collection::vec(step(), 1..100)) {
        let received = ReceivedFrames::default();
        received.push(&[7; 100]);
        run(Box::new(Network::new([2; 6], Box::new(IdlePeer), received)), &steps);
    }

    #[test]
    fn file_system_survives_any_driver(steps in prop::collection::vec(step(), 1..100)) {
        run(Box::new(FileSystem::new("tag", Box::new(IdlePeer))), &steps);
    }

    #[test]
    fn entropy_survives_any_driver(steps in prop::collection::vec(step(), 1..100)) {
        run(Box::new(Entropy::new(Box::new(SeededEntropy::new(3)))), &steps);
    }
}
