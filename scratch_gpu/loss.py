import json, os, subprocess, sys, time, threading, queue
out=os.environ['OUT']; end=time.time()+float(sys.argv[1])
A='gradsync, '
cells=[]
def add(n,size,opt,arms,seeds): cells.extend((n,size,opt,a,s) for s in seeds for a in arms)
b='large, batch 32'
add(2,b,'sgd',['gradsync',A+'sign, warm-up',A+'powersgd 16',A+'int8',A+'int4',A+'powersgd 4',A+'sign'],[0,1,2])
add(2,b,'adamw',[A+'powersgd 32'],[0,1,2])
add(2,b,'adamw',[A+'powersgd 16',A+'sign, warm-up'],[1,2])
q=queue.Queue(); [q.put((i,c)) for i,c in enumerate(cells)]
os.system('rm -rf /tmp/cells'); os.makedirs('/tmp/cells',exist_ok=True)
def work():
    while True:
        try: i,(n,size,opt,a,s)=q.get_nowait()
        except queue.Empty: return
        left=end-time.time()
        if left<30: return
        f=f'/tmp/cells/{i}.json'
        try:
            r=subprocess.run([sys.executable,'benchmarks/slow_link/main.py','loss','--device','cuda','--commit',sys.argv[2],'--steps','1000','--replicas',str(n),'--size',size,'--optimizer',opt,'--arms',a,'--seeds',str(s),'--out',f],timeout=left,capture_output=True,text=True)
            print(r.stdout.strip() or r.stderr[-800:],flush=True)
        except subprocess.TimeoutExpired: print('late',n,opt,a,s,flush=True)
ts=[threading.Thread(target=work) for _ in range(14)]
[t.start() for t in ts]; [t.join() for t in ts]
merged={}
for f in os.listdir('/tmp/cells'):
    merged.update(json.load(open('/tmp/cells/'+f)).get('loss',{}))
json.dump({'loss':merged},open(out+'/loss.json','w'))
print(len(merged),'of',len(cells))
