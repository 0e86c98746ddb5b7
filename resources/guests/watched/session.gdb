# Hardware breakpoints, watchpoints, single-steps and a breakpoint with a condition, in a program under ptrace.
set confirm off
set height 0
set disable-randomization on
break main
run
hbreak add
continue
printf "first n %ld\n", n
delete
watch total
continue
printf "watched %ld\n", total
continue
printf "watched %ld\n", total
delete
rwatch limit
continue
printf "read with total %ld\n", total
delete
stepi 200
printf "stepped with total %ld\n", total
break add if n == 50
continue
printf "condition n %ld total %ld\n", n, total
delete
continue
