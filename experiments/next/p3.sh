# Four H100s, what is left of the time: END=seconds bash .sim/p3.sh. Carry .sim .npzc.
. .sim/setup.sh
(on 0,1; study texts 2) &
(on 2; whole 2 bf16) &
(on 3; whole 3 fp8) &
wait; cp /tmp/bs.json $OUT/; last 0 2 3
