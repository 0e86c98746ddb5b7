//! Sessions of the real gdb with the machine of `examples/toy`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../examples/toy/toy/mod.rs"]
mod toy;

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hindsight_gdb::{GdbServer, ListenAddress};
use toy::ToyMachine;

/// A toy with its server, paused before its first instruction.
struct ServedToy {
    dir: tempfile::TempDir,
    /// Waits for the end of the machine and returns its exit status.
    end: JoinHandle<Option<u8>>,
    /// What the server reported while no client was connected.
    reports: Arc<Mutex<String>>,
}

impl ServedToy {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let address = ListenAddress::Unix(dir.path().join("gdb"));
        let listener = address.listen(false).unwrap();
        let machine = ToyMachine::start().unwrap();
        let reports = Arc::new(Mutex::new(String::new()));
        let collected = reports.clone();
        let report = move |message: &str| collected.lock().unwrap().push_str(message);
        let server = GdbServer::start(Box::new(machine.target()), listener, report).unwrap();
        let end = thread::spawn(move || {
            let status = machine.wait();
            server.finish(status);
            status
        });
        Self { dir, end, reports }
    }

    /// Runs a script of gdb commands and returns what gdb printed.
    fn gdb(&self, script: &str) -> String {
        let target = format!("target remote {}", self.dir.path().join("gdb").display());
        let setup = [
            "set pagination off",
            "set confirm off",
            "set width 0",
            &target,
        ];
        let mut command = Command::new("gdb");
        command.args(["-nx", "-batch"]);
        // One option for each command: an error would end a script.
        for line in setup.into_iter().chain(script.lines().map(str::trim)) {
            command.args(["-ex", line]);
        }
        let path = self.dir.path().join("output");
        let output = File::create(&path).unwrap();
        command.stdin(Stdio::null());
        command.stdout(output.try_clone().unwrap()).stderr(output);
        command
            .status()
            .expect("gdb is needed: apt-get install gdb");
        fs::read_to_string(path).unwrap()
    }

    /// Waits for the end of the machine and returns its exit status.
    fn finish(self) -> Option<u8> {
        self.end.join().unwrap()
    }
}

/// Checks that `text` contains the parts in this order.
#[track_caller]
fn in_order(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => panic!("no {part:?} in its order in:\n{text}"),
        }
    }
}

#[test]
fn breakpoints_watchpoints_and_steps_stop_the_toy() {
    let toy = ServedToy::start();
    let text = toy.gdb(
        "info threads
        x/3i $pc
        stepi
        print $rax
        break *0x10000b if $rax == 5
        continue
        delete
        watch *(long *)0x102000
        continue
        print $cs_access
        set $rax = 998
        delete
        continue
        continue",
    );
    in_order(
        &text,
        &[
            "\"vCPU 0\" (runs, 64-bit, CPL 0)",
            "inc    %rax",
            "mov    %rax,0x102000",
            "= 1",
            "Breakpoint 1, 0x000000000010000b",
            "Hardware watchpoint 2",
            "Old value = 5",
            "New value = 6",
            " L ",
            "toy: cpu 0: the guest halts; `continue` lets it",
            "exited normally",
        ],
    );
    assert_eq!(toy.finish(), Some(0));
}

#[test]
fn toy_goes_back_to_writes_breakpoints_and_the_beginning() {
    let toy = ServedToy::start();
    let text = toy.gdb(
        "break *0x10000b if $rax == 7
        continue
        watch *(long *)0x102000
        reverse-continue
        reverse-continue
        print $rax
        delete
        reverse-stepi
        monitor goto
        monitor goto 12
        maintenance flush register-cache
        print $rax
        monitor goto 999999
        maintenance flush register-cache
        print $rax
        reverse-continue
        continue
        kill",
    );
    in_order(
        &text,
        &[
            "Breakpoint 1, 0x000000000010000b",
            "Old value = 7",
            "New value = 6",
            "Old value = 6",
            "New value = 5",
            "$1 = 6",
            "at instruction 20",
            "at instruction 12; now type",
            "$2 = 3",
            "does not get to instruction 999999",
            "$3 = 1000",
            "No more reverse-execution history",
            "the guest halts",
        ],
    );
    assert_eq!(toy.finish(), None, "killed");
}

#[test]
fn branch_trace_of_the_toy_is_replayed() {
    let toy = ServedToy::start();
    let text = toy.gdb(
        "record btrace bts
        stepi 6
        record instruction-history
        reverse-stepi
        print $pc
        record stop
        kill",
    );
    in_order(
        &text,
        &[
            "inc",
            "mov",
            "cmp",
            "jne",
            "inc",
            "= (void (*)()) 0x100003",
            "Process record is stopped",
        ],
    );
}

#[test]
fn memory_and_registers_of_the_toy_are_written() {
    let toy = ServedToy::start();
    let text = toy.gdb(
        "set var *(long *)0x102000 = 77
        print *(long *)0x102000
        set $rbx = 0x1234
        print/x $rbx
        print *(char *)0x200000
        set $cr0 = 0UL
        set var *(char *)0x100000 = 0xcc
        continue
        continue",
    );
    in_order(
        &text,
        &[
            "= 77",
            "= 0x1234",
            "Cannot access memory at address 0x200000",
            "\"cr0\"; remote failure reply 'E.the processor cannot have this value in this register'",
            "toy: cpu 0: the toy lacks the instruction at 0x100000",
            "SIGILL",
        ],
    );
}

#[test]
fn monitor_commands_of_server_and_toy_reply() {
    let toy = ServedToy::start();
    let text = toy.gdb(
        "monitor help
        monitor help toy
        monitor toy
        monitor toy 1
        monitor regs
        monitor mem
        monitor pt 0x100000
        monitor msr 0x10
        monitor kaslr
        monitor frobnicate
        monitor catch exception #PF
        continue
        monitor catch off
        stepi
        monitor quit",
    );
    in_order(
        &text,
        &[
            "help [COMMAND]",
            "toy  ",
            "monitor toy: print how many instructions",
            "0 instructions",
            "usage: monitor toy",
            "cpu 0: stopped at 0x100000: inc %rax [48 ff c0]",
            "rax=0000000000000000",
            "0x0-0x200000 RAM",
            "0x100000 is 0x100000",
            "this processor has no MSR 0x10",
            "no Linux kernel is mapped yet",
            "frobnicate: no such command; `monitor help` lists them",
            "caught: #PF triple faults",
            "toy: cpu 0: the toy has no exceptions; type `monitor catch off`",
            "SIGTRAP",
            "caught: triple faults",
            "the machine ends",
        ],
    );
    assert_eq!(toy.finish(), None);
}

#[test]
fn toy_ends_by_itself_after_detach() {
    let toy = ServedToy::start();
    let text = toy.gdb("break *0x10000b\ncontinue\ndetach");
    in_order(&text, &["Breakpoint 1", "detached"]);
    assert_eq!(toy.finish(), Some(0));
}

#[test]
fn crash_without_a_client_is_reported() {
    let toy = ServedToy::start();
    toy.gdb("set var *(char *)0x100000 = 0xcc\ndetach");
    while toy.reports.lock().unwrap().is_empty() {
        thread::sleep(Duration::from_millis(5));
    }
    let text = toy.gdb("x/i $pc\nkill");
    assert!(text.contains("0x100000:\tint3"), "{text}");
    let reports = toy.reports.clone();
    assert_eq!(toy.finish(), None);
    let reports = reports.lock().unwrap();
    let line = "toy: cpu 0: the toy lacks the instruction at 0x100000\n";
    assert!(reports.starts_with(line), "{reports}");
    let waits = "toy: it waits for a debugger at unix:";
    assert!(reports.contains(waits), "{reports}");
}
