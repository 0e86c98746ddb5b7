//! Options of other monitors, and what they are called here.

/// What to use instead of an option of another monitor.
pub fn own_option(option: &str) -> Option<&'static str> {
    Some(match option {
        "--smp" | "--vcpus" => "the number of processors is --cpus",
        "--append" => "the kernel's command line is --cmdline",
        "--kernel" | "-k" => "the image has no option: name it alone",
        "--mem" | "-m" | "--ram" => "the size of memory is --memory",
        "-s" => "a debugger connects with --gdb :1234, and the number of processors is --cpus",
        "-S" => "the guest waits for a debugger with --gdb-wait",
        "--drive" | "--hda" | "-d" | "-h" => {
            "a disk is --disk FILE[,ro][,snapshot][,format=FORMAT]"
        }
        "--netdev" | "--nic" | "--network" => "a network is --net user[,hostfwd=tcp::2222-:22]",
        "--virtfs" | "--virtiofs" | "--shared-dir" => {
            "a folder of this machine is --share DIR=TAG[,rw]"
        }
        "--nographic" | "-n" => "there is no display: --serial stdio is the default",
        "-a" => "the kernel's command line is --cmdline",
        _ => return None,
    })
}
