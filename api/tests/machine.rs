//! Machines are run, inspected, recorded and brought back by a program.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hindsight_api::{BranchClass, Error, Events, Machine, Snapshot, Stop, TraceRequest, Until};
use tempfile::TempDir;

/// The guests of this test.
struct Guests(TempDir);

impl Guests {
    /// Compiles all guests, once.
    fn get() -> &'static Self {
        static GUESTS: OnceLock<Guests> = OnceLock::new();
        GUESTS.get_or_init(|| {
            let guests = Self(tempfile::tempdir().expect("there is room for files"));
            for guest in ["queue", "echo"] {
                guests.compile(guest);
            }
            guests
        })
    }

    fn compile(&self, guest: &str) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/make-debuggee");
        let status = Command::new(script)
            .arg(self.path(guest))
            .arg(guest)
            .status();
        assert!(status.expect("gcc is installed").success(), "{guest}");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// A machine at the entry of a guest.
fn machine(guest: &str) -> Machine {
    let builder = Machine::builder(Guests::get().path(guest));
    let built = builder.protocol("elf").memory("16M").build();
    built.expect("the machine can be built")
}

#[test]
fn machine_runs_to_a_symbol_and_reads_its_memory() {
    let mut machine = machine("queue");
    let main = machine.symbol("main").unwrap();
    let stop = machine.run_until(&Until::new().reaches("main")).unwrap();
    assert_eq!(
        stop,
        Stop::Reached {
            cpu: 0,
            address: main
        }
    );
    let registers = machine.registers(0).unwrap();
    assert_eq!(registers.rip(), main);
    // The return address, behind the CALL.
    let pushed = machine.read_memory(0, registers.rsp(), 8).unwrap();
    let pushed = u64::from_le_bytes(pushed.try_into().unwrap());
    assert_eq!(machine.name_of(pushed), "halt");
    assert_eq!(machine.name_of(main), "main");
    assert_eq!(machine.name_of(0x10), "0x10");
    assert_eq!(machine.count(), 3);
}

#[test]
fn machine_stops_at_the_guests_end_and_goes_back_from_there() {
    let mut machine = machine("queue");
    assert_eq!(machine.run().unwrap(), Stop::Exit(1));
    let end = machine.count();
    assert_eq!(machine.run().unwrap(), Stop::Exit(1), "again");
    let output = machine.take_output();
    assert_eq!(output, b"the guard is broken\n");
    assert_eq!(machine.back(10).unwrap(), Stop::Count);
    assert_eq!(machine.count(), end - 10);
    assert_eq!(machine.run().unwrap(), Stop::Exit(1));
    assert_eq!(machine.count(), end);
    assert_eq!(machine.take_output(), b"", "output is not repeated");
}

#[test]
fn same_address_is_reached_again_not_at_once() {
    let mut machine = machine("queue");
    let until = Until::new().reaches("queue_put");
    for _ in 0..20 {
        let stop = machine.run_until(&until).unwrap();
        assert!(matches!(stop, Stop::Reached { .. }), "{stop:?}");
    }
    assert_eq!(machine.run_until(&until).unwrap(), Stop::Exit(1));
}

#[test]
fn watched_write_stops_behind_its_instruction() {
    let mut machine = machine("queue");
    let total = machine.symbol("total").unwrap();
    machine.run_until(&Until::new().reaches("main")).unwrap();
    let stop = machine.run_until(&Until::new().writes(total, 8)).unwrap();
    let write = Stop::Accessed {
        cpu: 0,
        address: total,
        write: true,
    };
    assert_eq!(stop, write);
    assert_eq!(machine.read_memory(0, total, 1).unwrap(), [3]);
    let stop = machine.run_until(&Until::new().writes(total, 8).within(5));
    assert_eq!(stop.unwrap(), Stop::Count);
}

#[test]
fn written_memory_changes_the_future_and_going_back_undoes_it() {
    let mut machine = machine("queue");
    let total = machine.symbol("total").unwrap();
    machine.run_until(&Until::new().reaches("main")).unwrap();
    machine
        .write_memory(0, total, &1000_u64.to_le_bytes())
        .unwrap();
    let written = machine.count();
    machine.run_until(&Until::new().writes(total, 8)).unwrap();
    assert_eq!(
        machine.read_physical(total, 2).unwrap(),
        1003_u16.to_le_bytes()
    );
    machine.seek(written - 1).unwrap();
    assert_eq!(machine.read_physical(total, 2).unwrap(), [0, 0], "undone");
    machine.run_for(3).unwrap();
    assert_eq!(
        machine.read_physical(total, 2).unwrap(),
        1000_u16.to_le_bytes(),
        "repeated"
    );
    assert_eq!(machine.translate(0, total).unwrap(), Some(total));
}

#[test]
fn set_register_changes_the_future() {
    let mut machine = machine("queue");
    machine
        .run_until(&Until::new().reaches("queue_put"))
        .unwrap();
    let rsp = machine.registers(0).unwrap().rsp();
    let ret = machine.read_memory(0, rsp, 8).unwrap();
    let ret = u64::from_le_bytes(ret.try_into().unwrap());

    // The first job is never put.
    machine.set_register(0, "rip", ret).unwrap();
    machine.set_register(0, "rsp", rsp + 8).unwrap();
    machine
        .run_until(&Until::new().reaches("queue_put"))
        .unwrap();
    assert_eq!(machine.registers(0).unwrap().get("rsi"), Some(6));
}

#[test]
fn recorded_branches_and_accesses_lead_to_their_instructions() {
    let mut machine = machine("queue");
    let init = machine.symbol("queue_init").unwrap();
    let total = machine.symbol("total").unwrap();
    machine
        .start_trace(Events::BRANCHES | Events::ACCESSES)
        .unwrap();
    assert!(
        matches!(machine.seek(0), Ok(Stop::Count)),
        "nothing is behind it"
    );
    assert_eq!(machine.run().unwrap(), Stop::Exit(1));
    assert!(matches!(machine.back(1), Err(Error::Traced)));
    let trace = machine.stop_trace().unwrap();
    let branches: Vec<_> = trace.branches().unwrap().map(Result::unwrap).collect();
    let calls: Vec<_> = branches.iter().filter(|branch| branch.to == init).collect();
    assert_eq!(calls.len(), 1);
    assert_eq!((calls[0].class, calls[0].cpl), (BranchClass::DirectCall, 0));
    machine.seek(calls[0].at).unwrap();
    assert_eq!(machine.registers(0).unwrap().rip(), init, "behind the CALL");
    let accesses = trace.accesses().unwrap().map(Result::unwrap);
    let writes: Vec<_> = accesses
        .filter(|access| access.write && access.address == total)
        .collect();
    assert_eq!((writes.len(), writes[0].size), (10, 8));
    for write in &writes {
        machine.seek(write.at).unwrap();
        let before = machine.read_memory(0, total, 8).unwrap();
        machine.run_for(1).unwrap();
        assert_ne!(machine.read_memory(0, total, 8).unwrap(), before);
    }
    let file = Guests::get().path("trace.trace");
    trace.write(&file).unwrap();
    assert!(std::fs::metadata(file).unwrap().len() > 100);
}

#[test]
fn dropped_machine_ends_the_thread_of_its_trace() {
    /// The threads of this process that write the trace of the test's own machine.
    fn writers() -> usize {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let names =
            threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("comm")));
        names
            .filter(|name| matches!(name, Ok(name) if name == "trace\n"))
            .count()
    }
    let mut machines: Vec<_> = (0..20).map(|_| machine("echo")).collect();
    for machine in &mut machines {
        machine.start_trace(Events::BRANCHES).unwrap();
        machine.run_for(100).unwrap();
    }
    // A thread has its name once it runs.
    let limit = Instant::now() + Duration::from_secs(60);
    while writers() < 20 {
        assert!(Instant::now() < limit, "{} threads write", writers());
        std::thread::yield_now();
    }
    drop(machines);
    // Other tests have one each.
    assert!(writers() < 10);
}

#[test]
fn full_trace_stops_the_machine() {
    let mut machine = machine("echo");
    let options = TraceRequest {
        bytes_max: 1,
        ..Events::BRANCHES.into()
    };
    machine.start_trace(options).unwrap();
    assert_eq!(machine.run().unwrap(), Stop::TraceFull);
    let count = machine.count();
    assert_eq!(machine.run().unwrap(), Stop::TraceFull);
    assert_eq!(machine.count(), count);
    let trace = machine.stop_trace().unwrap();
    let last = trace.branches().unwrap().last().unwrap().unwrap();
    assert!(count - last.at < 10, "it has everything up to the stop");
    assert_eq!(machine.run_for(5).unwrap(), Stop::Count);
}

#[test]
fn sent_input_reaches_the_guest_and_is_repeated() {
    let mut machine = machine("echo");
    machine.run_for(100).unwrap();
    machine.send("abc").unwrap();
    assert_eq!(
        machine.run_until(&Until::new().prints("bc")).unwrap(),
        Stop::Printed
    );
    assert_eq!(machine.output(), b"abc");
    let (count, registers) = (machine.count(), machine.registers(0).unwrap());
    machine.run_for(100_000).unwrap();
    machine.seek(10).unwrap();
    machine.run_to(count).unwrap();
    assert_eq!(machine.registers(0).unwrap(), registers);
    machine.seek(10).unwrap();
    machine.send("q").unwrap();
    assert_eq!(machine.run().unwrap(), Stop::Exit(7), "another future");
    assert!(matches!(
        machine.send([0; 5000]),
        Err(Error::Input { len: 5000 })
    ));
}

#[test]
fn saved_machine_continues_in_another_one() {
    let mut first = machine("queue");
    first
        .run_until(&Until::new().reaches("queue_take"))
        .unwrap();
    let file = Guests::get().path("saved");
    first.save(&file).unwrap();
    let (count, registers) = (first.count(), first.registers(0).unwrap());
    assert_eq!(first.run().unwrap(), Stop::Exit(1));
    let mut second = machine("queue");
    second.load(&file).unwrap();
    assert_eq!((second.count(), second.begin()), (count, count));
    assert_eq!(second.registers(0).unwrap(), registers);
    assert_eq!(second.run().unwrap(), Stop::Exit(1));
    assert_eq!(second.count(), first.count());
    let mut other = Machine::builder(Guests::get().path("queue"))
        .protocol("elf")
        .memory("32M")
        .build()
        .unwrap();
    assert!(matches!(other.load(&file), Err(Error::Restore(_))));
}

#[test]
fn damaged_snapshots_are_refused() {
    let mut machine = machine("queue");
    let mut bytes = Vec::new();
    let snapshot = machine.snapshot().unwrap();
    snapshot.write(&mut bytes).unwrap();
    let memory = machine.memory_size();
    assert!(Snapshot::read(&*bytes, memory).is_ok());
    assert!(
        Snapshot::read(&*bytes, 0).is_err(),
        "more pages than memory"
    );
    for cut in [0, 7, 8, 20, bytes.len() / 2, bytes.len() - 1] {
        assert!(Snapshot::read(&bytes[..cut], memory).is_err(), "{cut}");
    }
    for at in (0..bytes.len()).step_by(bytes.len() / 97) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        // A changed bit of the compressed frame may mean the same.
        let read = Snapshot::read(&*damaged, memory);
        assert!(
            read.is_err() || read.unwrap() == snapshot,
            "at {at} of {}",
            bytes.len()
        );
    }
}

#[test]
fn snapshot_is_restored_any_number_of_times() {
    let mut machine = machine("echo");
    machine.run_for(1000).unwrap();
    let snapshot = machine.snapshot().unwrap();
    for text in ["xy", "z"] {
        machine.restore(&snapshot).unwrap();
        machine.take_output();
        machine.send(text).unwrap();
        machine.run_until(&Until::new().prints(text)).unwrap();
        assert_eq!(machine.take_output(), text.as_bytes());
        let count = machine.count();
        machine.back(10).unwrap();
        machine.run_for(10).unwrap();
        assert_eq!(machine.count(), count);
    }
}

#[test]
fn predicate_and_poll_stop_the_machine() {
    let mut machine = machine("queue");
    let total = machine.symbol("total").unwrap();
    let stop = machine.run_until_true(10, |machine| {
        machine
            .read_memory(0, total, 1)
            .is_ok_and(|byte| byte[0] > 10)
    });
    assert_eq!(stop.unwrap(), Stop::Predicate);
    assert!(matches!(
        machine.run_until_true(0, |_| true),
        Err(Error::Every)
    ));
    let mut machine = self::machine("echo");
    machine.set_poll(|| true);
    assert_eq!(machine.run().unwrap(), Stop::Interrupted);
    assert!(machine.count() < 10_000_000);
}

#[test]
fn poll_and_stop_end_a_run_in_which_nothing_retires() {
    let folder = TempDir::new().unwrap();
    let image = folder.path().join("rep.bin");
    // mov edi, 0xc0000000, where no device is; or ecx, -1; rep stosb
    let code = [0xbf, 0, 0, 0, 0xc0, 0x83, 0xc9, 0xff, 0xf3, 0xaa];
    std::fs::write(&image, code).unwrap();
    let mut machine = Machine::builder(&image)
        .protocol("flat")
        .option("mode", "protected")
        .memory("16M")
        .build()
        .unwrap();
    machine.stop_handle().stop();
    assert_eq!(machine.run().unwrap(), Stop::Interrupted);
    let mut calls = 0;
    machine.set_poll(move || {
        calls += 1;
        calls == 3
    });
    assert_eq!(machine.run().unwrap(), Stop::Interrupted);
    assert_eq!(machine.count(), 2);
    machine.seek(1).unwrap();
    assert_eq!(machine.count(), 1);
}

#[test]
fn guest_that_nothing_wakes_is_asleep() {
    let mut machine = machine("echo");
    let halt = machine.symbol("halt").unwrap();
    machine.set_register(0, "rip", halt).unwrap();
    assert_eq!(machine.run().unwrap(), Stop::Asleep);
    assert_eq!(machine.count(), 2, "CLI and HLT");
    machine.seek(0).unwrap();
    assert_eq!(machine.registers(0).unwrap().rip(), halt);
}

#[test]
fn errors_say_what_is_wrong() {
    let mut machine = machine("queue");
    let error = machine.symbol("mian").unwrap_err().to_string();
    assert_eq!(
        error,
        "\"mian\" is neither an address nor a symbol of the image"
    );
    assert!(
        matches!(machine.read_memory(0, 1 << 40, 8), Err(Error::Unmapped { address }) if address == 1 << 40)
    );
    assert!(matches!(
        machine.read_physical(0, 1 << 40),
        Err(Error::Length { .. })
    ));
    assert!(matches!(
        machine.registers(1),
        Err(Error::Cpu { cpu: 1, cpus: 1 })
    ));
    assert!(matches!(
        machine.set_register(0, "rex", 0),
        Err(Error::Register(_))
    ));
    assert!(matches!(machine.stop_trace(), Err(Error::NoTrace)));
    assert!(matches!(
        machine.start_trace(Events::PROCESSES),
        Err(Error::Processes)
    ));
    assert!(matches!(
        machine.set_register(0, "cr0", 1 << 31),
        Err(Error::RegisterValue { .. })
    ));
    let build = |name: &str, value: &str| {
        let builder = Machine::builder(Guests::get().path("queue"));
        builder.option(name, value).build().unwrap_err().to_string()
    };
    let error = build("memory", "1X");
    assert!(error.contains("--memory"), "{error}");
    let error = build("gdb", "tcp::1");
    assert!(error.contains("debuggers"), "{error}");
    let error = build("no-such-option", "1");
    assert!(error.contains("no-such-option"), "{error}");
}
