//! Linux images, with an initrd.
#![no_main]

use hindsight_fuzz::check;
use hindsight_vmm::boot::{LoadRequest, Protocol};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|image: &[u8]| {
    check(&LoadRequest {
        image,
        protocol: Some(Protocol::Linux),
        initrd: Some(&[0xab; 0x1800]),
        cmdline: b"console=ttyS0".to_vec(),
        ..LoadRequest::default()
    });
});
