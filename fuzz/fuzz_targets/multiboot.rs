//! Images of multiboot 1 and 2, of ELF and with addresses in the header, with modules.
#![no_main]

use hindsight_fuzz::check;
use hindsight_vmm::boot::{BootModule, LoadRequest, Protocol};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|image: &[u8]| {
    let module = |data| BootModule {
        name: b"module".to_vec(),
        data,
        args: b"name=value".to_vec(),
    };
    for protocol in [Protocol::Multiboot, Protocol::Multiboot2] {
        check(&LoadRequest {
            image,
            protocol: Some(protocol),
            modules: vec![module(&[1; 3]), module(&[2; 0x1001])],
            cmdline: b"quiet".to_vec(),
            text_screen: true,
            ..LoadRequest::default()
        });
    }
});
