# Four H100s, 590 s. Carry .sim .whl .npzb (texts); p3 brings the icons.
. .sim/setup.sh
(on 0,1; study texts 2) &
(on 2; timeout 70 python3 -m pytest -q -p no:cacheprovider -m gpu tests/models tests/training -n 6 > $OUT/2.txt 2>&1; said tests; tail -3 $OUT/2.txt
timeout 200 python3 .sim/blocks.py --models ViT-L-14 --rows 256 --size 2048 --steps 3 --variants all fp8 --output $OUT/l14-fp8.json >> $OUT/2.txt 2>&1; said fp8
timeout $(left) python3 .sim/start.py --model ViT-B-32 --size 8192 --steps 4 >> $OUT/2.txt 2>&1; said start
timeout $(left) python3 benchmarks/single_gpu.py --only 16 --only 17 --only 18 --only 19 --only 20 --only 21 --output $OUT/single-gpu-rest.json >> $OUT/2.txt 2>&1; said peers) &
(on 3; timeout 80 python3 .sim/st_profile.py 32768 65536 cuda megabatch 16 > $OUT/3.txt 2>&1; said profile
timeout 80 python3 .sim/st_profile.py 32768 65536 cuda megabatch 16 tf32 > $OUT/3t.txt 2>&1; said profile
for n in megabatch sentence-transformers; do timeout 300 python3 benchmarks/retriever.py --mini-batch-tokens 65536 --steps 100 --every 10 --lr 2e-4 --contenders $n --kept-mini-batches 16 --compile --output /tmp/r/$n.json >> $OUT/4.txt 2>&1; said $n; done
timeout $(left) python3 benchmarks/retriever.py --mini-batch-tokens 65536 --steps 6 --every 100 --contenders megabatch --kept-mini-batches 16 --compile --tf32 --output /tmp/r/tf32.json >> $OUT/4.txt 2>&1; said tf32) &
wait; cp /tmp/bs.json $OUT/; tar czf $OUT/r.tgz -C /tmp r; last 0 2 4; N=60 last 3
