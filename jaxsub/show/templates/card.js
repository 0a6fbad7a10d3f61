/* Says what is alive at the moment under the pointer. Reads the JSON beside it, sets text as text, asks for nothing. */
(function(){
var phases=["forward","recomputed","backward"];
function bytes(n){var u=["B","KiB","MiB","GiB"],i=0;while(n>=1024&&i<3){n/=1024;i++}
return(i?n.toFixed(n<10?2:1):n.toFixed(0))+" "+u[i]}
function start(root){
if(root.dataset.ready)return;root.dataset.ready="1";
var data=JSON.parse(root.querySelector('script[type="application/json"]').textContent);
var area=root.querySelector(".js-area"),cursor=root.querySelector(".js-cursor"),detail=root.querySelector(".js-detail");
var ends=[],t=0;data.steps.forEach(function(s){t+=s[0];ends.push(t)});
var at=-1,held=false;
function cell(row,text,name){var c=document.createElement("td");c.textContent=text;if(name)c.className=name;row.appendChild(c)}
function show(i){
i=Math.max(0,Math.min(data.steps.length-1,i));if(i===at)return;at=i;
var s=data.steps[i],alive=data.pieces.filter(function(p){return p[0]<=i&&i<p[0]+p[1]});
var groups={},total=s[3]+s[4];
alive.forEach(function(p){total+=p[2];var l=p[3]<0?"stored":data.labels[p[3]],f=l.replace(/^[^\s:]+(?=: )/,function(m){return m.replace(/\d+/g,"*")}),k=f+"|"+p[2];
var g=groups[k]=groups[k]||[0,p[2],l];g[0]++;if(g[2]!==l)g[2]=f});
var rows=Object.values(groups).sort(function(a,b){return b[0]*b[1]-a[0]*a[1]});
var lines=rows.slice(0,8).map(function(r){return[bytes(r[0]*r[1]),(r[0]>1?r[0]+" × ":"")+r[2]]});
var rest=rows.slice(8).reduce(function(n,r){return n+r[0]*r[1]},0);
if(rest)lines.push([bytes(rest),"smaller"]);
var own=s[3];(data.parts[i]||[]).forEach(function(r){own-=r[1];lines.push([bytes(r[1]),(r[0]>1?r[0]+" × ":"")+r[2]])});
[["its own transients",own],["cotangents on their way",s[4]]].forEach(
function(o){if(o[1])lines.push([bytes(o[1]),o[0]])});
var title=document.createElement("b"),table=document.createElement("table");
title.textContent=phases[s[1]]+", "+data.labels[s[2]];
lines.forEach(function(l){var row=document.createElement("tr");cell(row,l[0],"js-number");cell(row,l[1]);table.appendChild(row)});
detail.replaceChildren(title," "+bytes(total),table);
cursor.style.display="block";cursor.style.left=100*(ends[i]-s[0]/2)/data.end+"%";
}
function find(e){var box=area.getBoundingClientRect(),x=(e.clientX-box.left)/box.width*data.end;
var i=ends.findIndex(function(end){return x<=end});return i<0?data.steps.length-1:i}
area.addEventListener("pointermove",function(e){if(!held)show(find(e))});
area.addEventListener("click",function(e){held=!held;show(find(e));area.focus()});
area.addEventListener("keydown",function(e){var d={ArrowLeft:-1,ArrowRight:1}[e.key];if(d){held=true;e.preventDefault();show(at+d)}});
}
document.querySelectorAll('[data-jaxsub="{{ key }}"]').forEach(start);
})();
