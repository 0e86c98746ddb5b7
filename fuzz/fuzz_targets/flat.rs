//! Flat images at any address, in all modes; and whatever detection makes of the bytes. The first 17
//! bytes of the input are the options.
#![no_main]

use hindsight_fuzz::check;
use hindsight_vmm::boot::{EntryMode, LoadRequest, Protocol};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[options, ref addresses @ ..], image)) = data.split_first_chunk::<17>() else {
        return;
    };
    let addresses = u128::from_le_bytes(*addresses);
    let mode = match options & 3 {
        0 => None,
        1 => Some(EntryMode::Real),
        2 => Some(EntryMode::Protected),
        _ => Some(EntryMode::Long),
    };
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    let (load_address, entry) = (addresses as u64, (addresses >> 64) as u64);
    check(&LoadRequest {
        image,
        protocol: (options & 4 == 0).then_some(Protocol::Flat),
        load_address: (options & 8 == 0).then_some(load_address),
        entry: (options & 16 == 0).then_some(entry),
        mode,
        ..LoadRequest::default()
    });
});
