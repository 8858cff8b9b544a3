# Four H100s, 590 s. Carry .sim .whl .npzb .npzc (62 of 64 MiB).
. .sim/setup.sh
(on 0,1; study texts 2) &
(on 2; whole 2 bf16) &
(on 3; timeout 80 python3 .sim/st_profile.py 32768 65536 cuda megabatch 16 > $OUT/3.txt 2>&1; said profile
for n in megabatch sentence-transformers; do timeout 320 python3 benchmarks/retriever.py --mini-batch-tokens 65536 --steps 100 --every 10 --lr 2e-4 --contenders $n --kept-mini-batches 16 --compile --output /tmp/r/$n.json >> $OUT/4.txt 2>&1; said $n; done
timeout $(left) python3 benchmarks/retriever.py --mini-batch-tokens 65536 --steps 6 --every 100 --contenders megabatch --kept-mini-batches 16 --compile --tf32 --output /tmp/r/tf32.json >> $OUT/4.txt 2>&1; said tf32) &
wait; cp /tmp/bs.json $OUT/; tar czf $OUT/r.tgz -C /tmp r; last 0 2 4; N=60 last 3
