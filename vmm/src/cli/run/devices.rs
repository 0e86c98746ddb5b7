//! The devices on the PCI bus that the options name.

use anyhow::Context;
use hindsight_devices::virtio::VirtioDevice;
use hindsight_devices::virtio::entropy::{Entropy, EntropySource, SeededEntropy};

use crate::cli::config::{OptionWord, RunConfig};
use crate::virtio::net::{self, NetLink, NetSpec};
use crate::virtio::vsock::{self, VsockLink};
use crate::virtio::{disk, share};

/// Random numbers of the host's kernel.
struct HostEntropy;

impl EntropySource for HostEntropy {
    fn fill(&mut self, mut data: &mut [u8]) {
        while !data.is_empty() {
            match rustix::rand::getrandom(&mut *data, rustix::rand::GetRandomFlags::empty()) {
                Ok(count) => data = &mut data[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("the host has no random numbers: {error}");
                    return;
                }
            }
        }
    }
}

/// The devices of a machine, and what the host must do for them.
#[derive(Default)]
pub struct OpenedDevices {
    /// The devices in the order of their slots.
    pub devices: Vec<Box<dyn VirtioDevice>>,
    /// The hosts' ends of networks and sockets.
    pub links: DeviceLinks,
}

/// The hosts' ends of devices, with the indices of the devices.
#[derive(Default)]
pub struct DeviceLinks {
    /// Networks.
    pub networks: Vec<(usize, NetLink)>,
    /// Sockets.
    pub sockets: Vec<(usize, VsockLink)>,
}

impl DeviceLinks {
    /// Moves the devices behind `count` others.
    pub fn follow(&mut self, count: usize) {
        let networks = self.networks.iter_mut().map(|(index, _)| index);
        let sockets = self.sockets.iter_mut().map(|(index, _)| index);
        networks.chain(sockets).for_each(|index| *index += count);
    }
}

/// Opens the devices in the order of their slots.
///
/// # Errors
///
/// When the host cannot provide one of them.
pub fn open(config: &RunConfig) -> anyhow::Result<OpenedDevices> {
    let OpenedDevices {
        mut devices,
        mut links,
    } = OpenedDevices::default();
    for spec in &config.devices.disk {
        let disk = disk::open(&spec.0, config.machine.cpus).context("--disk")?;
        devices.push(Box::new(disk));
    }
    if let Some(path) = &config.devices.cdrom {
        devices.push(Box::new(disk::open_disc(path).context("--cdrom")?));
    }
    for spec in &config.devices.share {
        devices.push(Box::new(share::open(&spec.0).context("--share")?));
    }
    if let Some(OptionWord(NetSpec::User(forwards))) = &config.devices.net {
        let (card, link) = net::open(forwards).context("--net")?;
        links.networks.push((devices.len(), link));
        devices.push(Box::new(card));
    }
    if let Some(OptionWord(spec)) = &config.devices.vsock {
        let (device, link) = vsock::open(spec).context("--vsock")?;
        links.sockets.push((devices.len(), link));
        devices.push(Box::new(device));
    }
    if config.devices.rng {
        let source: Box<dyn EntropySource> = match config.deterministic_seed() {
            Some(seed) => Box::new(SeededEntropy::new(seed)),
            None => Box::new(HostEntropy),
        };
        devices.push(Box::new(Entropy::new(source)));
    }
    Ok(OpenedDevices { devices, links })
}
