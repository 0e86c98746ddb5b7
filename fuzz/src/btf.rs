//! Type information of a kernel, as a guest may have made it up.

use hindsight_gdb::kernel::BtfTypes;

/// Structures and members, among them such that the process tracker searches for.
const SEARCHED: [(&str, &str); 4] = [
    ("task_struct", "comm"),
    ("dentry", "d_name.name"),
    ("file", "f_path.dentry"),
    ("file", "f_path.dentry.d_name.name"),
];

/// Parses `bytes`, and searches for members.
pub fn check(bytes: &[u8]) {
    let Some(types) = BtfTypes::parse(bytes.to_vec()) else {
        return;
    };
    for (structure, path) in SEARCHED {
        let offset = types.offset(structure, path);
        assert!(
            offset.is_none() || types.size(structure).is_some(),
            "a member of no structure"
        );
    }
}
