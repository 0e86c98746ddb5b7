//! A debugger's writes in a run that goes back and forth.

use crate::rig::{Guest, Run, in_order};

#[test]
fn write_stays_while_gdb_goes_back_after_it_and_is_undone_once_across_it() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "break queue_put if job == 9
        continue
        delete
        print jobs.taken
        set var jobs.taken = 77
        set var $r15 = 1234
        set var $k_gs_base = 4096
        set var $tsc_aux = 1
        stepi 3
        reverse-stepi
        print jobs.taken
        reverse-stepi 2
        print jobs.taken
        print $r15
        print $k_gs_base
        print/x $tsc_aux
        monitor goto
        reverse-stepi
        print jobs.taken
        print $r15
        print $k_gs_base
        print/x $tsc_aux
        stepi
        print jobs.taken
        print $r15
        monitor goto 0
        maintenance flush register-cache
        print jobs.taken
        watch jobs.taken
        continue
        continue
        ",
    );
    in_order(
        &text,
        &[
            "$1 = 1\n",
            "$2 = 77\n",
            "$3 = 77\n",
            "$4 = 1234\n",
            "$5 = 4096\n",
            "$6 = 0x1\n",
            "$7 = 1\n",
            "$8 = 0\n",
            "$9 = 0\n",
            "$10 = 0x0\n",
            "$11 = 77\n",
            "$12 = 1234\n",
            "$13 = 0\n",
            "New value = 1\n",
            "Old value = 1\n",
            "New value = 78\n",
        ],
    );
}

#[test]
fn write_in_the_past_drops_what_came_later() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "break queue_put if job == 9
        continue
        set var jobs.taken = 77
        stepi 5
        set var jobs.taken = 78
        stepi 5
        reverse-stepi 8
        print jobs.taken
        set var jobs.taken = 79
        stepi 8
        print jobs.taken
        reverse-stepi 9
        print jobs.taken
        kill
        ",
    );
    in_order(&text, &["$1 = 77\n", "$2 = 79\n", "$3 = 77\n"]);
}

#[test]
fn called_guest_function_is_one_write_of_the_timeline() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "break main.c:21 if job == 9
        continue
        print jobs.taken
        print queue_take(&jobs) != 0
        print jobs.taken
        reverse-next
        frame
        print jobs.taken
        next
        print jobs.taken
        next
        reverse-stepi
        reverse-stepi
        print jobs.taken
        watch jobs.taken
        reverse-continue
        frame
        kill
        ",
    );
    in_order(
        &text,
        &[
            "$1 = 4\n",
            "$2 = 1\n",
            "$3 = 5\n",
            "work (count=20) at main.c:20",
            "$4 = 4\n",
            "main.c:21",
            "$5 = 5\n",
            "$6 = 5\n",
            "watchpoint 2",
            "New value = 3",
            "queue_take",
        ],
    );
}
